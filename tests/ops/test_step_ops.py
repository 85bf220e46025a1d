"""What lies between the larger ops of a step, on every backend: bit for bit, and by hand."""

from __future__ import annotations

import pytest
import torch
from ops.contracts.backends import backends
from ops.contracts.step import (
    accepted,
    chained,
    check_chain,
    check_commit,
    check_feed,
    check_path,
    check_start,
    fed,
    graph_of,
    int32,
    state,
)

import gsd_kernels as gsd
from gsd_kernels.graph import unpack_bits
from gsd_kernels.ops import step
from gsd_kernels.ops.step.reference import laid_out

pytestmark = pytest.mark.quick

CHECKS = {f.__name__: f for f in (check_start, check_feed, check_chain, check_path, check_commit)}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@backends("cpu", "cuda")
def test_equal_the_reference(on, check):
    for seed in range(12):
        check(seed, on)


@backends("reference", "cpu", "cuda")
def test_a_started_graph_is_the_root_and_its_text(on):
    graph = on.to(graph_of(0))
    tokens = torch.tensor([[0, 0, 5, 6, 7, 9], [1, 2, 3, 4, 9, 9], [8, 9, 9, 9, 9, 9]])
    text = on.to((tokens, int32(5, 4, 1), int32(2, 0, 0)))
    assert step.start_graph(graph, *text, backend=on.name).tolist() == [3, 4, 1]
    assert graph.token_ids[:, 0].tolist() == [7, 4, 8] and not graph.token_ids[:, 1:].any()
    assert graph.contexts[:, 0, :4].tolist() == [[6, 5, -1, -1], [3, 2, 1, -1], [-1] * 4]
    assert graph.num_nodes.tolist() == [1, 1, 1] and not graph.num_merges.any() and not graph.expanded.any()
    assert (graph.edge_targets == -1).all() and (graph.parents == -1).all() and not graph.ancestor_mask.any()


@backends("reference", "cpu", "cuda")
def test_fed_rows_by_hand(on):
    depths, node_depths = int32(3, 4)[None], torch.zeros(1, 5, dtype=torch.int32)
    rows = on.to((int32(10, 99)[None], depths, int32(20), int32(5)))
    node_depths = on.to(node_depths)
    got = step.feed_rows(*rows, vocab=50, first_slot=2, shift=1, node_depths=node_depths, backend=on.name)
    assert [t.tolist() for t in got] == [[[10, 0]], [[22, 23]], [[17, 18]], [[2, 3]], [[18, 19]]]
    assert node_depths.tolist() == [[0, 0, 2, 3, 0]]


@backends("reference", "cpu", "cuda")
def test_a_chain_is_right_aligned_and_sees_what_is_before(on):
    tokens, cached = on.to((torch.arange(10, 20)[None], int32(3)))
    got = step.feed_chain(tokens, on.to(int32(5)), cached, 4, backend=on.name)
    assert got.kv_len.tolist() == [3] and cached.tolist() == [5]
    assert got.token_ids.tolist() == [[0, 0, 13, 14]] and got.slots.tolist() == [[2, 3, 0, 1]]
    assert got.depths.tolist() == [[0, 0, 0, 1]] and got.node_depths.tolist() == [[0, 1, 2, 3]]
    assert got.ancestor_mask.flatten().tolist() == [0b100, 0b1000, 0b1, 0b11]


@backends("reference", "cpu", "cuda")
def test_texts_grow_end_and_are_counted(on):
    """The first ends with its room, the second with a token, the third was done."""
    tokens = on.to(torch.zeros(3, 8, dtype=torch.int64))
    of = on.to(
        {
            "out_len": int32(2, 3, 4),
            "remaining": int32(2, 9, 0),
            "done": torch.tensor([False, False, True]),
            "emitted": torch.full((3, 4), -1, dtype=torch.int32),
            "num_emitted": int32(0, 0, 0),
            "counts": torch.zeros(3, dtype=torch.int64),
        }
    )
    path = on.to(gsd.Acceptance(torch.zeros(3, 3, dtype=torch.int32), int32(2, 3, 0), int32(6, 7, 7)))
    new = on.to(torch.tensor([[5, 6, 0], [8, 9, 7], [0, 0, 0]], dtype=torch.int32))
    step.commit_text(new, path, eos_ids=on.to(int32(7)), tokens=tokens, **of, backend=on.name)
    assert tokens.tolist() == [[0, 0, 5, 6, 0, 0, 0, 0], [0, 0, 0, 8, 9, 7, 0, 0], [0] * 8]
    assert of["out_len"].tolist() == [4, 6, 4] and of["remaining"].tolist() == [0, 6, 0]
    assert of["done"].tolist() == [True, True, True] and of["num_emitted"].tolist() == [2, 3, 0]
    assert of["emitted"].tolist() == [[5, 6, 0, -1], [8, 9, 7, -1], [0, 0, 0, -1]]


def test_the_cases_say_something():
    merged = set()
    for seed in range(12):
        path, rows, graph = accepted(seed)
        after, now = state(seed), state(seed)
        tokens, nodes = step.accepted_path(path, rows, backend="reference")
        step.commit_text(tokens, path, eos_ids=int32(3), **after, nodes=nodes, graph=graph, backend="reference")
        merged.add(int(after["counts"][2] - now["counts"][2]))
        assert set(path.num_accepted.tolist()) > {0} and after["done"].tolist()[1]
    assert len(merged) > 1
    assert any((case["end"] - case["cached"] > case["width"]).any() for case in map(chained, range(12)))
    assert all((case["end"] == case["cached"]).any() for case in map(chained, range(12)))


def test_triton_has_none_of_them_and_takes_what_auto_does():
    assert step.feed_rows(**fed(0), backend="triton").ids.shape == fed(0)["token_ids"].shape


def test_rows_of_a_chain_see_what_is_before_them_and_no_padding():
    lacking, width = torch.tensor([5, 3, 1], dtype=torch.int32, device="cpu"), 6
    first = torch.tensor([2, 0, -4], dtype=torch.int32, device="cpu")
    count, real, slots, depths, mask = laid_out(lacking, width, first)
    assert count.tolist() == lacking.tolist() and real.sum(1).tolist() == lacking.tolist()
    for sees, begin, number, own, is_row in zip(unpack_bits(mask, width), first, lacking, slots, real, strict=True):
        for row in range(width):
            link = row - (width - int(number))
            before = {slot for slot in range(max(int(begin), 0), link + 1)} if is_row[row] else set()
            assert {*sees[row].nonzero()[:, 0].tolist()} == before | {int(own[row])}
    assert depths.min() >= 0
