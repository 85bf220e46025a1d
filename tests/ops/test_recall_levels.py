"""Levels that the n-gram table drafts in one call: what recall, calibration and merge make of them one by one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from ops.contracts.backends import assert_bit_equal, backends
from ops.contracts.ngram import poisoned
from torch import Tensor
from torch.nn.functional import pad

import gsd_kernels as gsd
from gsd_kernels.ops.ngram import calibrate_candidates, ngram_recall
from gsd_kernels.ops.recall_levels import RecalledLevels, recall_levels


@dataclass(frozen=True)
class Case:
    """A table that has read random texts of few tokens, so that look-ups go on for several levels, and a graph."""

    batch: int = 2
    vocab: int = 4
    text: int = 60  # tokens read
    branch: int = 3
    table_branch: int = 3
    width: int = 4
    levels: int = 5
    merge_context: int = 2
    calibrated: bool = True
    opened: bool = False  # a level of another source comes before
    padded: int = 0  # absent nodes of the given frontier
    min_prob: float = float("-inf")
    sibling_ratio: float = float("-inf")

    def build(self) -> tuple[gsd.NgramTable, gsd.TokenGraph, Tensor, Tensor | None]:
        """Table, graph, frontier and calibration."""
        gen = torch.Generator().manual_seed(self.vocab + self.text)
        table = gsd.NgramTable.empty(self.batch, self.table_branch, "cpu", capacity=256, max_context=4, ways=8)
        text = torch.randint(0, self.vocab, (self.batch, self.text + 5), generator=gen).int()
        contexts = text.unfold(1, 5, 1)[:, :-1].flip(-1).contiguous()  # [B, M, max_context + 1], the nearest first
        entries = contexts.shape[1]
        others = torch.randint(-1, self.vocab, (self.batch, entries, self.table_branch - 1), generator=gen).int()
        following = torch.cat((text[:, 5:, None], others), -1).contiguous()  # the same token twice, too
        log_probs = torch.rand(following.shape, generator=gen).sort(-1, descending=True)[0].log()
        log_probs = torch.where(following < 0, -torch.inf, log_probs).contiguous()
        known = torch.ones(self.batch, entries, dtype=torch.bool)
        if entries:
            gsd.ngram_insert(table, contexts, following, log_probs, known, backend="reference")
        config = gsd.GraphConfig(
            depth=int(self.opened),
            width=self.width,
            branch=self.branch,
            max_rows=24,
            merge_context=self.merge_context,
            history_depth=self.levels,
        )
        graph = gsd.TokenGraph.empty(self.batch, config, "cpu")
        tail = pad(text[:, -9:-1].flip(-1), (0, 8), value=-1)[:, :8].contiguous()
        graph.reset(text[:, -1].contiguous(), tail)
        frontier = graph.root_frontier()
        if self.opened:
            first = torch.arange(self.branch, dtype=torch.int32).expand(self.batch, 1, -1).contiguous()
            chances = torch.linspace(-0.5, -1.5, self.branch).expand(self.batch, 1, -1).contiguous()
            level = {"level": 0, "width": self.width, "merge_context": self.merge_context, "backend": "reference"}
            frontier = gsd.merge(graph, frontier, first, chances, **level).node_ids
        if self.padded:
            frontier = frontier.clone()
            frontier[0, -self.padded :] = -1
        log_ratio = torch.rand(5, self.table_branch + 2, generator=gen).log() if self.calibrated else None
        return table, graph, frontier, log_ratio

    def options(self, sampled: bool) -> dict[str, object]:
        options = {
            "level": int(self.opened),
            "levels": self.levels,
            "width": self.width,
            "merge_context": self.merge_context,
            "log_sibling_ratio": self.sibling_ratio,
            "log_min_prob": self.min_prob,
        }
        return options | (noise(self.batch) if sampled else {})


def noise(batch: int) -> dict[str, Tensor]:
    sequences = torch.arange(batch, dtype=torch.int32)
    return {"first_pick": sequences + 7, "seed": torch.tensor(-3), "sequence_ids": sequences + 2}


CASES = {
    "from the root": Case(),
    "behind a level": Case(opened=True),
    "padded frontier": Case(opened=True, padded=2),
    "none given": Case(opened=True, padded=4, batch=1),  # the next level takes what the graph holds
    "nothing known": Case(text=0),
    "few tokens again": Case(vocab=40, text=50, levels=9),
    "runs dry": Case(min_prob=-2.0, sibling_ratio=-0.7),
    "as remembered": Case(calibrated=False, opened=True),
    "no merging": Case(merge_context=-1),
    "merged by token": Case(merge_context=0, levels=8),
    "few candidates": Case(branch=2, table_branch=4),
    "one of each": Case(branch=1, table_branch=1, width=1, levels=1, batch=1),
    "many sequences": Case(batch=19, opened=True),  # several threads
    "trimmed": Case(min_prob=-9.0, sibling_ratio=-0.7),
}


def one_by_one(case: Case, sampled: bool, backend: str) -> tuple[gsd.TokenGraph, RecalledLevels]:
    """The levels by the ops that they are made of."""
    table, graph, frontier, log_ratio = case.build()
    options = case.options(sampled)
    asked = {name: options[name] for name in noise(1)} if sampled else {}
    merged = {name: options[name] for name in ("width", "merge_context", "log_sibling_ratio", "log_min_prob")}
    nodes, found = pad(frontier, (0, case.width - frontier.shape[1]), value=-1), []
    for number in range(options["level"], options["level"] + case.levels):
        tokens, log_probs, matched = ngram_recall(table, graph, nodes, **asked, backend=backend)
        absent = nodes < 0
        tokens = tokens.masked_fill(absent[..., None], -1)
        log_probs = log_probs.masked_fill(absent[..., None], -torch.inf)
        matched = matched.masked_fill(absent, 0)
        calibrated = log_probs
        if log_ratio is not None:
            calibrated = calibrate_candidates(log_probs, log_ratio, index=matched, backend=backend)
        found.append(RecalledLevels(nodes, tokens, log_probs, matched, calibrated))
        nodes = gsd.merge(graph, nodes, tokens, calibrated, level=number, **merged, backend=backend).node_ids
    return graph, RecalledLevels(*(torch.cat(parts, 1) for parts in zip(*found, strict=True)))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", CASES)
@backends("cpu", "reference")
def test_levels_are_those_of_recall_calibrate_and_merge(on, name, sampled):
    case = CASES[name]
    expected_graph, expected = one_by_one(case, sampled, on.name)
    table, graph, frontier, log_ratio = case.build()
    with poisoned():
        found = recall_levels(table, graph, frontier, log_ratio, **case.options(sampled), backend=on.name)
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
@backends("cpu")
def test_without_noise_the_compiled_levels_are_the_references(on, name):
    case, found = CASES[name], []
    for backend in (on.name, "reference"):
        table, graph, frontier, log_ratio = case.build()
        levels = recall_levels(table, graph, frontier, log_ratio, **case.options(False), backend=backend)
        found.append((*levels, *graph.tensors()))
    assert_bit_equal(*found)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"frontier": torch.zeros(2, 1)}, "frontier"),
        ({"frontier": torch.zeros(2, 5, dtype=torch.int32)}, "1 … width nodes.*got 5"),
        ({"levels": 0}, "levels"),
        ({"level": -1}, "level"),
        ({"log_ratio": torch.zeros(5, 2)}, r"log_ratio: expected \[1 or more, 3 or more\]"),
        ({"log_ratio": torch.zeros(5, 3, dtype=torch.float64)}, "log_ratio"),
        ({"merge_context": 9}, "merge_context"),
        ({"seed": torch.tensor(3)}, "expected all or none"),
        (noise(2) | {"first_pick": torch.zeros(2)}, "first_pick"),
        (noise(2) | {"sequence_ids": torch.zeros(3, dtype=torch.int32)}, "sequence_ids"),
        ({"backend": "triton"}, "backend"),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_changed(wrong, match):
    case = CASES["from the root"]
    table, graph, frontier, log_ratio = case.build()
    before = graph.clone()
    given = {"frontier": frontier, "log_ratio": log_ratio} | case.options(False) | wrong
    with pytest.raises((TypeError, ValueError), match=match):
        recall_levels(table, graph, **given)
    assert_bit_equal(graph, before)


def test_a_table_of_fewer_candidates_is_refused():
    case = Case(branch=3, table_branch=3)
    _, graph, frontier, _ = case.build()
    table = gsd.NgramTable.empty(2, 2, "cpu", capacity=256, max_context=4, ways=8)
    with pytest.raises(ValueError, match="graph: expected a branch of at most 2, got 3"):
        recall_levels(table, graph, frontier, **case.options(False))


@backends("cpu")
def test_levels_beyond_the_graph_are_refused(on):
    case = CASES["no merging"]
    table, graph, frontier, log_ratio = case.build()
    with pytest.raises(RuntimeError, match=r"the levels need .* nodes, the graph holds 100"):
        recall_levels(table, graph, frontier, log_ratio, **case.options(False) | {"levels": 40}, backend=on.name)
