"""Levels that the history drafts in one call: what recall and merge make of them one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from ops.contracts.backends import assert_bit_equal, backends
from ops.contracts.history import Known, noise, on_device, tail_of
from ops.contracts.ngram import poisoned
from torch import Tensor
from torch.nn.functional import pad

import gsd_kernels as gsd
from gsd_kernels.ops.history import Recollection, history_recall
from gsd_kernels.ops.recall_levels import RecalledLevels, recall_levels

pytestmark = pytest.mark.quick


@dataclass(frozen=True)
class Case:
    """A history that has read random texts of few tokens, so that look-ups go on for several levels, and a graph."""

    batch: int = 2
    vocab: int = 4
    text: int = 60  # tokens read
    branch: int = 3
    remembered: int = 3
    width: int = 4
    levels: int = 5
    merge_context: int = 2
    opened: bool = False  # a level of another source comes before
    padded: int = 0  # absent nodes of the given frontier
    min_prob: float = 0.0
    sibling_ratio: float = 0.0

    def build(self) -> tuple[Recollection, gsd.TokenGraph, Tensor]:
        """History, graph and frontier."""
        given = {name: getattr(self, name) for name in ("batch", "vocab", "text", "branch", "remembered")}
        known, text = Known(**given, runners=min(self.text, 8)).build()
        graph = gsd.TokenGraph.empty(self.batch, self.config.replace(history_width=8), "cpu")
        graph.reset(text[:, -1].contiguous(), tail_of(text))
        frontier = graph.root_frontier()
        if self.opened:
            first = torch.arange(self.branch, dtype=torch.int32).expand(self.batch, 1, -1).contiguous()
            chances = torch.linspace(-0.5, -1.5, self.branch).expand(self.batch, 1, -1).contiguous()
            level = {"level": 0, "width": self.width, "merge_context": self.merge_context, "backend": "reference"}
            frontier = gsd.merge(graph, frontier, first, chances, **level).node_ids
        if self.padded:
            frontier = frontier.clone()
            frontier[0, -self.padded :] = -1
        return known, graph, frontier

    @property
    def config(self) -> gsd.GraphConfig:
        return gsd.GraphConfig(
            depth=int(self.opened),
            width=self.width,
            branch=self.branch,
            max_rows=24,
            merge_context=self.merge_context,
            sibling_ratio=self.sibling_ratio,
            min_prob=self.min_prob,
            history_depth=self.levels,
            history_width=self.width,
        )

    def options(self, sampled: bool) -> dict[str, object]:
        options = {"level": int(self.opened), "config": self.config}
        return options | (noise(self.batch) if sampled else {})


CASES = {
    "from the root": Case(),
    "behind a level": Case(opened=True),
    "padded frontier": Case(opened=True, padded=2),
    "none given": Case(opened=True, padded=4, batch=1),  # the next level takes what the graph holds
    "nothing known": Case(text=0),
    "few tokens again": Case(vocab=40, text=50, levels=9),
    "runs dry": Case(min_prob=math.exp(-2.0), sibling_ratio=0.5),
    "no merging": Case(merge_context=-1),
    "merged by token": Case(merge_context=0, levels=8),
    "few candidates": Case(branch=2, remembered=4),
    "one of each": Case(branch=1, remembered=1, width=1, levels=1, batch=1),
    "many sequences": Case(batch=19, opened=True, levels=2),  # several threads
    "trimmed": Case(min_prob=math.exp(-20.0), sibling_ratio=0.5),
}


def one_by_one(case: Case, sampled: bool, backend: str) -> tuple[gsd.TokenGraph, RecalledLevels]:
    """The levels by the ops that they are made of."""
    known, graph, frontier = case.build()
    options = case.options(sampled)
    asked = {name: options[name] for name in noise(1)} if sampled else {}
    merged = {"width": case.width, "config": case.config}
    nodes, found = pad(frontier, (0, case.width - frontier.shape[1]), value=-1), []
    for number in range(options["level"], options["level"] + case.levels):
        tokens, log_probs, matched = history_recall(known, graph, nodes, **asked, backend=backend)
        absent = nodes < 0
        tokens = tokens.masked_fill(absent[..., None], -1)
        log_probs = log_probs.masked_fill(absent[..., None], -torch.inf)
        matched = matched.masked_fill(absent, 0)
        found.append(RecalledLevels(nodes, tokens, log_probs, matched))
        nodes = gsd.merge(graph, nodes, tokens, log_probs, level=number, **merged, backend=backend).node_ids
    return graph, RecalledLevels(*(torch.cat(parts, 1) for parts in zip(*found, strict=True)))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", CASES)
@backends("cpu", "reference")
def test_levels_are_those_of_recall_and_merge(on, name, sampled):
    case = CASES[name]
    expected_graph, expected = one_by_one(case, sampled, on.name)
    known, graph, frontier = case.build()
    with poisoned():
        found = recall_levels(known, graph, frontier, **case.options(sampled), backend=on.name)
    assert_bit_equal(found, expected)
    assert_bit_equal(graph, expected_graph)
    first = int(case.opened)
    grown = graph.depths.max() - first
    if name == "nothing known":
        assert grown == 0 and (found.tokens < 0).all()
    elif name == "runs dry":
        assert (found.node_ids >= 0).sum() > 0 and (found.node_ids[:, -case.width :] < 0).all(1).any()
    else:
        assert grown >= min(case.levels, 5) - 1


@pytest.mark.parametrize("name", CASES)
@backends("cpu", "cuda")
def test_without_noise_the_compiled_levels_are_the_references(on, name):
    case, found, chances = CASES[name], [], []
    for backend, device in ((on.name, on.device), ("reference", "cpu")):
        known, *rest = case.build()
        known, rest = on_device(known, device), rest if device == "cpu" else on.to(rest)
        graph, frontier = rest
        levels = recall_levels(known, graph, frontier, **case.options(False), backend=backend)
        whole = (levels.node_ids, levels.tokens, levels.matched, graph.token_ids, graph.edge_targets)
        found.append(tuple(t.cpu() for t in whole))
        chances.append(levels.log_probs.cpu())
    assert_bit_equal(*found)
    torch.testing.assert_close(*chances, atol=recall_levels.tolerance, rtol=0)


@backends("cpu")
def test_a_table_of_fewer_candidates_is_refused(on):
    case = Case(branch=3, remembered=2)
    known, graph, frontier = case.build()
    with pytest.raises(RuntimeError, match="branch: expected at most 2, got 3"):
        recall_levels(known, graph, frontier, **case.options(False), backend=on.name)


@backends("cpu")
def test_levels_beyond_the_graph_are_refused(on):
    case = CASES["no merging"]
    known, graph, frontier = case.build()
    with pytest.raises(RuntimeError, match=r"the levels need .* nodes, the graph holds 100"):
        recall_levels(known, graph, frontier, config=case.config.replace(history_depth=40), level=0, backend=on.name)
