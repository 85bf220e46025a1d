"""Histories → token graph → the tree that SGLang verifies: its form, its rows by load, what requests share."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from gsd_kernels.graph import TokenGraph
from gsd_kernels_sglang.drafter import TAIL, Drafter, Text
from gsd_kernels_sglang.load import RowPolicy
from gsd_kernels_sglang.options import Options
from gsd_kernels_sglang.statistics import Statistics

SMALL = {"capacity": 4096}


def drafter(rows: int = 9, branch: int = 3, batch_rows: int = 1000, **options) -> Drafter:
    return Drafter(Options(**SMALL, **options), rows, branch, RowPolicy(rows, batch_rows))


def text(key: str, tokens: list[int]) -> Text:
    return Text(key, tokens[-TAIL:], lambda: tokens)


def paths(drafted, b: int) -> list[tuple[int, ...]]:
    """The tokens from the root to each row of a request, by the arrays that SGLang gets."""
    tokens, mask = drafted.arrays()
    rows = drafted.num_rows
    tokens, mask = tokens.reshape(-1, rows)[b], mask.reshape(-1, rows, rows)[b]
    return [tuple(int(tokens[j]) for j in np.flatnonzero(mask[i])) for i in range(rows)]


def answer(drafted, nearly: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates of a target that picks 50 after every row."""
    shape = (*drafted.rows.token_ids.shape, 3)
    tokens = (50 + torch.arange(3) * nearly).to(torch.int32).expand(shape).contiguous()
    return tokens, torch.tensor([0.7, 0.2, 0.1]).log().expand(shape).contiguous()


def test_the_arrays_are_trees_as_sglang_reads_them():
    """Parents first, each row below its root's text once, links found by the largest ancestor, padding unreachable."""
    draw, ours, merges = random.Random(3), drafter(rows=13, branch=3, merge_context=0), 0
    texts = {key: [draw.randrange(6) for _ in range(12)] for key in "abcd"}
    for _ in range(30):
        keys = draw.sample("abcd", draw.randrange(1, 5))
        drafted = ours.draft([text(key, texts[key]) for key in keys])
        tokens, mask = drafted.arrays()
        count = drafted.num_rows
        assert tokens.dtype == np.int64 and mask.dtype == np.bool_
        assert (tokens.shape, mask.shape) == ((len(keys) * count,), (len(keys) * count * count,))
        merges += int(drafted.graph.num_merges.sum())
        for b, key in enumerate(keys):
            real, found = int(drafted.rows.num_rows[b]), paths(drafted, b)
            tree = mask.reshape(len(keys), count, count)[b]
            assert tree.diagonal().all() and not np.triu(tree, 1).any()
            assert all(tree[i, 0] for i in range(real)) and not tree[real:, :real].any()
            assert found[0] == (texts[key][-1],) and len(set(found[:real])) == real
            for i in range(1, real):
                parent = max(j for j in range(i) if tree[i, j])
                assert found[i][:-1] == found[parent], "a row's ancestors are its parent's and itself"
        shape = (*drafted.rows.token_ids.shape, 3)
        best = torch.tensor([draw.sample(range(6), 3) for _ in range(len(keys) * count)], dtype=torch.int32)
        log_probs = torch.tensor([0.5, 0.3, 0.1]).log().expand(shape).contiguous()
        counts = torch.ones(len(keys), dtype=torch.int32)
        ours.observe(drafted, (best.view(shape), log_probs), torch.zeros(shape[:2], dtype=torch.int64), counts)
        for key in keys:
            texts[key].append(draw.randrange(6))
    assert merges > 20


@pytest.mark.parametrize("shared", [True, False])
def test_requests_see_each_others_verified_rows_only_if_shared(shared):
    ours = drafter(shared=shared)
    first = ours.draft([text("a", [1, 2, 3, 4])])
    assert paths(first, 0) == [(4,)]
    ours.observe(first, answer(first), torch.tensor([[50]]), torch.tensor([1]))
    other = paths(ours.draft([text("b", [1, 2, 3, 4])]), 0)
    assert ((4, 50) in other) is shared
    assert (4, 50) in paths(ours.draft([text("a", [1, 2, 3, 4])]), 0)
    assert paths(ours.draft([text("c", [7, 8, 9, 10])]), 0) == [(10,)]


@pytest.mark.parametrize(
    ("requests", "rows"), [(0, 16), (1, 16), (4, 16), (5, 12), (8, 8), (32, 2), (33, 1), (64, 1), (1000, 1)]
)
def test_rows_follow_the_load(requests, rows):
    assert RowPolicy(16, 64).budget(requests) == rows


def test_statistics_count_accepted_merge_edges():
    """Root 1 → 2 → 3 and 1 → 4, which a merge edge leads on to 3."""
    config = Options(**SMALL).graph_config(8, 2)
    graph = TokenGraph.empty(1, config, "cpu")
    graph.reset(torch.tensor([1], dtype=torch.int32), torch.full((1, 8), -1, dtype=torch.int32))
    graph.token_ids[0, :4] = torch.tensor([1, 2, 4, 3], dtype=torch.int32)
    graph.parents[0, :4] = torch.tensor([-1, 0, 0, 1], dtype=torch.int32)
    graph.edge_targets[0, 0] = torch.tensor([1, 2])
    graph.edge_targets[0, 1, 0] = graph.edge_targets[0, 2, 0] = 3
    graph.edge_log_probs[0, :3] = -0.5
    graph.num_nodes.fill_(4)
    graph.num_merges.fill_(1)
    from gsd_kernels import flatten

    rows, counted = flatten(graph, 8, 7), Statistics()
    counted.add(rows, graph, torch.tensor([[4, 3, 9, 0, 0, 0, 0, 0]]), torch.tensor([3]))
    assert (counted.nodes, counted.merged, counted.accepted, counted.accepted_merged) == (3, 1, 2, 1)
    counted.add(rows, graph, torch.tensor([[2, 3, 9, 0, 0, 0, 0, 0]]), torch.tensor([3]))
    assert (counted.accepted, counted.accepted_merged, counted.tokens) == (4, 1, 6)
    assert "steps=2 tokens_per_step=3.000" in counted.line() and "merged_share=0.250" in counted.line()
