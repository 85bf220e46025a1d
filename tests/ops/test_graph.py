"""Merge and flatten: equal to sequential oracles, and the invariants of the graph and its rows."""

from __future__ import annotations

import dataclasses

import oracle
import pytest
import torch
from graphs import STYLES, drafted
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.contracts.graph import configs

import gsd_kernels as gsd
from gsd_kernels.graph import pack_bits, unpack_bits


def oracle_graphs(graph, config, frontiers):
    tails = graph.contexts[:, 0].tolist()
    graphs = [oracle.OracleGraph([int(graph.token_ids[b, 0])], tails[b]) for b in range(graph.token_ids.shape[0])]
    for frontier, tokens, log_probs, _ in frontiers:
        for b, g in enumerate(graphs):
            nxt = oracle.merge(
                g,
                frontier[b].tolist(),
                tokens[b].tolist(),
                log_probs[b].numpy(),
                config.width,
                config.merge_context,
                config.log_sibling_ratio,
                config.log_min_prob,
            )
            yield b, g, nxt


@settings(max_examples=120, deadline=None)
@given(configs(), st.sampled_from(STYLES), st.integers(2, 12), st.integers(0, 10**6))
def test_graph_and_rows_equal_the_sequential_oracles(config, style, vocab, seed):
    levels = []
    graph = drafted(
        config,
        vocab=vocab,
        style=style,
        seed=seed,
        on_level=lambda _g, _l, f, t, lp, nxt: levels.append((f.clone(), t, lp, nxt)),
    )
    batch = graph.token_ids.shape[0]
    steps = list(oracle_graphs(graph, config, levels))
    for index, (b, _, expected) in enumerate(steps):
        assert levels[index // batch][3].node_ids[b].tolist() == expected
    rows = gsd.flatten(graph, config.max_rows, config.max_path, backend="reference")
    for b, expected, _ in steps[-batch:]:
        count = int(graph.num_nodes[b])
        assert graph.token_ids[b, :count].tolist() == expected.tokens
        assert graph.parents[b, :count].tolist() == expected.parents
        assert graph.scores[b, :count].tolist() == [float(s) for s in expected.scores]
        assert int(graph.num_merges[b]) == expected.merges
        for node in range(count):
            edges = expected.edges.get(node, [None] * config.branch)
            assert graph.edge_targets[b, node].tolist() == [-1 if e is None else e[0] for e in edges]
        flat = oracle.flatten(expected, config.max_rows, config.max_path)
        n = int(rows.num_rows[b])
        assert n == len(flat)
        got = zip(rows.node_ids[b], rows.parent_rows[b], rows.depths[b], rows.scores[b], strict=True)
        assert [tuple(x.item() for x in r) for r in got][:n] == [(a, p, d, float(s)) for a, p, d, s in flat]
        assert (rows.node_ids[b, n:] == -1).all() and (rows.parent_rows[b, n:] == -1).all()
    check_invariants(graph, rows, config)


def check_invariants(graph, rows, config):
    targets = graph.edge_targets
    ids = torch.arange(graph.capacity)[None, :, None]
    assert ((targets == -1) | (targets > ids)).all(), "an edge runs backwards"
    assert (graph.num_nodes <= config.node_capacity).all()
    for b in range(targets.shape[0]):
        incoming = targets[b][targets[b] >= 0]
        count = int(graph.num_nodes[b])
        assert set(incoming.tolist()) == set(range(1, count)), "a node is unreachable, or an edge leads nowhere"
        if config.merge_context == -1:
            assert len(incoming) == count - 1 and int(graph.num_merges[b]) == 0, "a tree has a merge edge"
        if config.width == config.branch == 1:
            assert (graph.parents[b, :count] == torch.arange(count) - 1).all(), "a chain branches"
        for node in range(count):
            children = graph.token_ids[b][targets[b, node][targets[b, node] >= 0].long()].tolist()
            assert len(children) == len(set(children)), "two children of a node have the same token"
        n = int(rows.num_rows[b])
        mask = unpack_bits(rows.ancestor_mask[b], config.max_rows)
        seen = set()
        for row in range(config.max_rows):
            path, up = set(), row
            while up >= 0:
                path.add(up)
                up = int(rows.parent_rows[b, up]) if row < n else -1
            assert set(mask[row].nonzero().flatten().tolist()) == path
            if row < n:
                assert int(rows.depths[b, row]) == len(path) - 1 <= config.max_path
                assert row == 0 or 0 <= int(rows.parent_rows[b, row]) < row
                key = (int(rows.parent_rows[b, row]), int(rows.token_ids[b, row]))
                assert key not in seen, "two children of a row have the same token"
                seen.add(key)
        assert n <= config.max_rows


def test_frontier_masks_name_the_slots_of_the_primary_path():
    config = gsd.GraphConfig(depth=5, width=9, branch=3, merge_context=1)  # 36 slots: two mask words
    slots = {}

    def check(graph, level, frontier, tokens, log_probs, nxt):
        for b in range(nxt.node_ids.shape[0]):
            for i, node in enumerate(nxt.node_ids[b].tolist()):
                bits = set(unpack_bits(nxt.ancestor_mask[b, i], 64).nonzero().flatten().tolist())
                own = level * config.width + i
                if node < 0:
                    assert bits == {own}
                    continue
                if own < 64:
                    slots[b, node] = own
                path, up = set(), node
                while up > 0:
                    path |= {slots[b, up]} if (b, up) in slots else set()
                    up = int(graph.parents[b, up])
                assert bits == path

    drafted(config, vocab=40, on_level=check)


def test_bits_round_trip():
    for n in (1, 31, 32, 33, 100):
        mask = torch.rand(3, 5, n) < 0.5
        assert torch.equal(unpack_bits(pack_bits(mask), n), mask)


def test_merging_happens_where_the_context_agrees():
    """Hand-drawn: after a and b the draft proposes the same x; context 0 joins them, context 1 does not."""
    for merge_context, nodes in ((0, 4), (1, 5)):
        config = gsd.GraphConfig(depth=2, width=2, branch=2, merge_context=merge_context)
        graph = gsd.TokenGraph.empty(1, config, "cpu")
        graph.reset(torch.tensor([9], dtype=torch.int32), torch.full((1, 8), -1, dtype=torch.int32))
        step = {"width": 2, "merge_context": merge_context, "backend": "reference"}
        a_b = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[-0.5, -1.0]]])
        frontier = gsd.merge(graph, graph.root_frontier(), *a_b, level=0, **step)
        x = torch.tensor([[[7, -1], [7, -1]]], dtype=torch.int32), torch.full((1, 2, 2), -0.1)
        gsd.merge(graph, frontier.node_ids, *x, level=1, **step)
        assert graph.num_nodes.item() == nodes and graph.num_merges.item() == 5 - nodes


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"depth": 0}, "depth"),
        ({"width": 65}, "width"),
        ({"branch": 0}, "branch"),
        ({"max_rows": 1}, "max_rows"),
        ({"max_rows": 129}, "max_rows"),
        ({"max_path": 32}, "max_path"),
        ({"merge_context": 9}, "merge_context"),
        ({"sibling_ratio": 1.5}, "sibling_ratio"),
        ({"min_prob": -0.1}, "min_prob"),
        ({"depth": 60, "width": 32}, "nodes"),
    ],
)
def test_config_out_of_range_names_the_field(change, match):
    with pytest.raises(ValueError, match=match):
        gsd.GraphConfig(**change)


def test_config_types_presets_and_freezing():
    with pytest.raises(TypeError, match="depth"):
        gsd.GraphConfig(depth=2.0)
    with pytest.raises(TypeError, match="nonsense"):
        gsd.GraphConfig.preset("tree", nonsense=1)
    with pytest.raises(ValueError, match="chain, tree, graph"):
        gsd.GraphConfig.preset("forest")
    chain = gsd.GraphConfig.preset("chain", depth=7)
    assert (chain.width, chain.branch, chain.max_rows, chain.merge_context) == (1, 1, 8, -1)
    assert gsd.GraphConfig.preset("tree").merge_context == -1
    with pytest.raises(dataclasses.FrozenInstanceError):
        chain.depth = 3
    assert chain.replace(max_rows=4).max_path == 3
