"""merge, and the rows that flatten makes of its graphs: sequential oracles, invariants, and bits of every backend."""

from __future__ import annotations

import itertools

import hundred_lines
import pytest
import torch
from graphs import STYLES, drafted
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.contracts.arguments import merge_arguments
from ops.contracts.backends import ALL, assert_bit_equal, backends, cases, needs_cpu
from ops.contracts.graph import (
    CUDA_GRAPHS,
    GRAPHS,
    agreeing_target,
    check_flatten_of_any_graph,
    check_graph,
    check_merge_into_arbitrary_graph,
    check_verification,
    configs,
)

import gsd_kernels as gsd
from gsd_kernels.graph import unpack_bits

pytestmark = pytest.mark.quick

oracle = hundred_lines.load()


def oracle_graphs(graph, config, frontiers):
    tails = graph.contexts[:, 0].tolist()
    graphs = [oracle.Graph([int(graph.token_ids[b, 0])], tails[b]) for b in range(graph.token_ids.shape[0])]
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


EVERY = [(f"{name}-{style}", (name, style)) for name, style in itertools.product(GRAPHS, STYLES)]
FEW = [  # by name, one or two styles, and all of them once
    (f"{name}-{style}", (name, style))
    for name in GRAPHS
    for style in (STYLES if name == "graph" else STYLES[len(name) % 3 :: 3])
]


@cases("case", {"cpu": EVERY, "interpreter": FEW, "triton": EVERY, "cuda": EVERY})
def test_levels_and_rows(on, case):
    (config, vocab), style = GRAPHS[case[0]], case[1]
    batch = 5 if not on.interpreted else 2 if case[0] == "graph" else 1  # interpreted programs run one after another
    graph, _ = check_graph(config, style, vocab, STYLES.index(style), on, batch=batch)
    assert int(graph.num_merges.sum()) == 0 or case[0] not in ("tree", "chain")


@pytest.mark.parametrize("name", ["graph", "context-0", "context-3"])
def test_the_cases_merge(name):
    config, vocab = GRAPHS[name]
    styles = [style for _, (at, style) in FEW if at == name]
    graphs = [drafted(config, vocab=vocab, style=s, seed=STYLES.index(s)) for s in styles]
    assert sum(int(graph.num_merges.sum()) for graph in graphs) > 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("config", CUDA_GRAPHS, ids=str)
@backends("cpu", "triton", "cuda")
def test_a_step(on, config, style, batch):
    _, rows = check_graph(config, style, 7, batch, on, batch)
    rows = gsd.Rows(*(t.cpu() for t in rows.tensors()))
    sampled, arguments = agreeing_target(rows, 7, batch)
    arguments["done"] = torch.arange(batch) == 1
    check_verification(rows, sampled, arguments, config.max_path, on)


@needs_cpu
@settings(max_examples=100, deadline=None)
@given(configs(), st.sampled_from(STYLES), st.integers(2, 12), st.integers(0, 10**6))
def test_any_compiled_step(config, style, vocab, seed):
    _, rows = check_graph(config, style, vocab, seed, ALL["cpu"])
    sampled, arguments = agreeing_target(rows, vocab, seed)
    for done in (torch.tensor([False, False]), torch.tensor([True, False])):
        check_verification(rows, sampled, {**arguments, "done": done}, config.max_path, ALL["cpu"])


SEEDS = {"cpu": range(20), "interpreter": range(3), "triton": range(20), "cuda": range(20)}


@pytest.mark.parametrize("merge_context", [-1, 0, 1, 3])
@cases("seed", {name: [(str(seed), seed) for seed in seeds] for name, seeds in SEEDS.items()})
def test_merge_into_arbitrary_graphs(on, seed, merge_context):
    check_merge_into_arbitrary_graph(seed, merge_context, on)


@cases("seed", {name: [(str(seed), seed) for seed in seeds] for name, seeds in SEEDS.items()})
def test_any_graph_is_flattened_by_kernels(on, seed):
    check_flatten_of_any_graph(seed, 24, 6, on)


@needs_cpu
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 12))
def test_any_graph_is_flattened(seed, max_rows, max_path):
    check_flatten_of_any_graph(seed, max_rows, min(max_path, max_rows - 1), ALL["cpu"])


@backends("cpu", "interpreter", "triton", "cuda")
def test_merge_of_many_candidates(on):
    """Several row blocks and column blocks: 130 candidates, 300 nodes."""
    config = gsd.GraphConfig(depth=4, width=26, branch=5, max_rows=128, merge_context=1)
    graph, _ = check_graph(config, "random", 6, 0, on, batch=1)
    assert int(graph.num_merges.sum()) > 50


@backends("cpu", "cuda")
def test_large_batches_run_on_several_threads(on):
    check_graph(gsd.GraphConfig(depth=5, width=8, branch=4, max_rows=64), "ties", 9, 0, on, batch=67)


@pytest.mark.parametrize("style", STYLES)
@backends("cpu", "triton", "cuda")
def test_the_largest_graph(on, style):
    check_graph(gsd.GraphConfig(depth=3, width=63, branch=8, max_rows=128, merge_context=1), style, 6, 0, on)


@backends("cpu", "cuda")
def test_the_widest_branch(on):
    config = gsd.GraphConfig(depth=2, width=30, branch=32, max_rows=128, merge_context=0)
    check_graph(config, "ties", 64, 0, on)


@backends("reference", "cpu", "interpreter", "triton", "cuda")
def test_a_candidate_joins_the_best_node_and_at_ties_the_oldest(on):
    """Hand-drawn: three nodes hold the candidate's token after the same context; two of them share the best score."""
    config = gsd.GraphConfig(depth=2, width=2, branch=2, max_rows=8, merge_context=1)
    graph = gsd.TokenGraph.empty(1, config, on.device)
    graph.reset(*on.to((torch.tensor([9], dtype=torch.int32), torch.full((1, 8), -1, dtype=torch.int32))))
    graph.token_ids[0, 1:4] = 5
    graph.contexts[0, 1:4, 0] = 9
    graph.scores[0, 1:4] = torch.tensor([-2.0, -1.0, -1.0])
    graph.parents[0, 1:4] = 0
    graph.num_nodes[0] = 4
    candidates = torch.tensor([[[5, 6]]], dtype=torch.int32), torch.tensor([[[-0.5, -0.7]]])
    step = {"level": 0, "width": 2, "merge_context": 1, "backend": on.name}
    nxt = gsd.merge(graph, graph.root_frontier(), *on.to(candidates), **step)
    assert graph.edge_targets[0, 0].tolist() == [2, 4] and graph.num_merges.item() == 1
    assert nxt.node_ids[0].tolist() == [4, 2]


def test_a_config_is_its_rules_and_one_of_both_is_needed():
    found = []
    config = gsd.GraphConfig(merge_context=0, sibling_ratio=0.4, min_prob=0.3)
    rules = {"log_sibling_ratio": config.log_sibling_ratio, "log_min_prob": config.log_min_prob}
    for said in ({"config": config}, {"merge_context": 0, **rules}):
        arguments = {**merge_arguments(), "merge_context": None, **said}
        arguments["cand_log_probs"] = torch.tensor([0.5, 0.25, 0.1]).log().expand(2, 1, 3).contiguous()
        frontier = gsd.merge(**arguments)
        found.append((*arguments["graph"].tensors(), *frontier.tensors()))
    assert_bit_equal(*found)
    assert frontier.node_ids.tolist() == [[1, -1]] * 2 and arguments["graph"].num_nodes.tolist() == [3, 3]
    with pytest.raises(TypeError, match="merge_context: expected a number of tokens, or a config"):
        gsd.merge(**{**merge_arguments(), "merge_context": None})
