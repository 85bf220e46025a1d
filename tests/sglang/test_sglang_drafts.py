"""Histories → token graph → the tree that SGLang verifies: its form, its rows by load, what requests share."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from gsd_kernels.graph import TokenGraph
from gsd_kernels_sglang.drafter import TAIL, Drafter, Text
from gsd_kernels_sglang.history import OTHERS, RELIABILITY, History
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


def test_a_new_request_drafts_from_its_own_prompt():
    ours = drafter()
    drafted = ours.draft([text("a", [5, 6, 7, 8, 5, 6, 7, 8, 5, 6])])
    assert paths(drafted, 0)[:4] == [(6,), (6, 7), (6, 7, 8), (6, 7, 8, 5)]


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


def test_a_prompt_is_never_shared():
    ours = drafter()
    ours.draft([text("a", [1, 2, 3, 4, 1, 2, 3])])
    assert paths(ours.draft([text("b", [2, 3])]), 0) == [(3,)]


def test_what_nearly_followed_is_drafted_too():
    ours = drafter()
    first = ours.draft([text("a", [1, 2])])
    ours.observe(first, answer(first), torch.tensor([[9]]), torch.tensor([1]))
    assert {(2, 50), (2, 51), (2, 52)} <= set(paths(ours.draft([text("a", [1, 2])]), 0))


def test_a_request_that_comes_back_is_read_anew():
    ours = drafter(shared=False)
    ours.draft([text("a", [1, 2, 3])])
    before = ours.numbers["a"]
    ours.forget(["a", "unknown"])
    assert paths(ours.draft([text("a", [4, 5, 4, 5])]), 0)[:2] == [(5,), (5, 4)]
    assert ours.numbers["a"] != before
    assert paths(ours.draft([text("b", [1, 2])]), 0) == [(2,)], "what the request left belongs to nobody"


def test_the_longer_context_weighs_more_and_one_that_is_alone_counts_in_full():
    history = History(Options(**SMALL), 3)
    history.read(0, torch.tensor([1, 2, 3, 4], dtype=torch.int32))  # 1 2 3 → 4, for request 0
    candidates = torch.tensor([[[5, 6, -1]]], dtype=torch.int32), torch.tensor([[[0.6, 0.3, 0.0]]]).log()
    context = torch.tensor([[[3, 9, -1, -1]]], dtype=torch.int32)  # 9 3 → 5 or 6, of request 1
    history.remember(torch.tensor([1], dtype=torch.int32), context, *candidates, torch.ones(1, 1, dtype=torch.bool))

    def recalled(number: int, *nearest: int) -> dict[int, float]:
        contexts = torch.tensor([[[*nearest, *[-1] * (4 - len(nearest))]]], dtype=torch.int32)
        tokens, log_probs = history.recall(torch.tensor([number], dtype=torch.int32), contexts)
        return {t: p for t, p in zip(tokens[0, 0].tolist(), log_probs[0, 0].exp().tolist(), strict=True) if t >= 0}

    known = RELIABILITY[1]
    assert recalled(0, 2, 1) == pytest.approx({3: 0.6 * RELIABILITY[2]})
    assert recalled(7, 3) == pytest.approx({5: 0.6 * known, 6: 0.3 * known}), "only others know it"
    both = recalled(0, 3, 2, 1)  # three tokens of its own text, one of another request's
    weight = OTHERS["shorter"]
    own = 0.6 * RELIABILITY[3] * (1 - weight)
    assert both == pytest.approx({4: own, 5: weight * 0.6 * known, 6: weight * 0.3 * known})
    both = recalled(0, 3)
    weight = OTHERS["equal"]
    assert both == pytest.approx({4: 0.6 * known * (1 - weight), 5: weight * 0.6 * known, 6: weight * 0.3 * known})
    assert recalled(0, 8) == recalled(7, 2) == {}


@pytest.mark.parametrize(
    ("requests", "rows"), [(0, 16), (1, 16), (4, 16), (5, 12), (8, 8), (32, 2), (33, 1), (64, 1), (1000, 1)]
)
def test_rows_follow_the_load(requests, rows):
    assert RowPolicy(16, 64).budget(requests) == rows


def test_rows_stay_where_sglang_has_fixed_them():
    fixed = RowPolicy.of(16, 8, backend="triton", device="cuda", captured=True)
    assert (fixed.budget(100), fixed.used(16, 2)) == (16, 16)
    captured = RowPolicy.of(16, 64, backend="flashinfer", device="cuda", captured=True)
    assert (captured.budget(8), captured.used(8, 2)) == (8, 8)
    free = RowPolicy.of(16, None, backend="torch_native", device="cpu", captured=False)
    assert (free.budget(2), free.budget(4), free.used(8, 2), free.used(8, 9)) == (16, 8, 2, 8)
    assert RowPolicy.of(16, None, backend="flashinfer", device="cuda", captured=False).budget(16) == 16
    assert not RowPolicy.of(16, None, backend=None, device="cuda", captured=False).flexible


def test_a_full_batch_is_plain_decoding():
    ours = drafter(batch_rows=3)
    drafted = ours.draft([text(key, [1, 2, 1, 2]) for key in "abcd"])
    tokens, mask = drafted.arrays()
    assert drafted.graph is None and drafted.num_rows == 1
    assert tokens.tolist() == [2] * 4 and mask.tolist() == [True] * 4
    ours.observe(drafted, answer(drafted), torch.full((4, 1), 50), torch.ones(4, dtype=torch.int32))
    assert (ours.statistics.tokens, ours.statistics.rows, ours.statistics.nodes) == (4, 4, 0)
    assert (2, 50) in paths(ours.draft([text("a", [1, 2, 1, 2])]), 0), "plain steps are learned from as well"


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


def test_long_texts_and_short_ones_in_one_batch():
    ours = drafter(rows=4)
    long = [i % 11 for i in range(3000)]
    drafted = ours.draft([text("long", long), text("short", [3])])
    assert paths(drafted, 0) == [tuple((long[-1] + j) % 11 for j in range(i + 1)) for i in range(4)]
    assert paths(drafted, 1)[0] == (3,) and int(drafted.rows.num_rows[1]) == 1
