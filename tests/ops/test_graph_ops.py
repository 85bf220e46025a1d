"""merge, flatten and verify on every backend: the reference's graphs, rows and paths, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from graphs import STYLES, drafted
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.contracts.arguments import rows_case
from ops.contracts.backends import ALL, backend_param, backends, cases
from ops.contracts.graph import (
    CUDA_GRAPHS,
    GRAPHS,
    agreeing_target,
    check_flatten_of_any_graph,
    check_graph,
    check_merge_into_arbitrary_graph,
    check_verification,
    check_verify,
    configs,
)

import gsd_kernels as gsd

EVERY = [(f"{name}-{style}", (name, style)) for name, style in itertools.product(GRAPHS, STYLES)]
FEW = [  # by name, one or two styles, and all of them once
    (f"{name}-{style}", (name, style))
    for name in GRAPHS
    for style in (STYLES if name == "graph" else STYLES[len(name) % 3 :: 3])
]
COMPILED = backend_param("cpu").marks[0]


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


@COMPILED
@settings(max_examples=100, deadline=None)
@given(configs(), st.sampled_from(STYLES), st.integers(2, 12), st.integers(0, 10**6))
def test_any_compiled_step(config, style, vocab, seed):
    _, rows = check_graph(config, style, vocab, seed, ALL["cpu"])
    sampled, arguments = agreeing_target(rows, vocab, seed)
    for done in (torch.tensor([False, False]), torch.tensor([True, False])):
        check_verification(rows, sampled, {**arguments, "done": done}, config.max_path, ALL["cpu"])


@COMPILED
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 12))
def test_any_graph_is_flattened(seed, max_rows, max_path):
    check_flatten_of_any_graph(seed, max_rows, min(max_path, max_rows - 1), ALL["cpu"])


SEEDS = {"cpu": range(20), "interpreter": range(3), "triton": range(20), "cuda": range(20)}


@cases("seed", {name: [(str(seed), seed) for seed in seeds] for name, seeds in SEEDS.items()})
def test_any_graph_is_flattened_by_kernels(on, seed):
    check_flatten_of_any_graph(seed, 24, 6, on)


@pytest.mark.parametrize("merge_context", [-1, 0, 1, 3])
@cases("seed", {name: [(str(seed), seed) for seed in seeds] for name, seeds in SEEDS.items()})
def test_merge_into_arbitrary_graphs(on, seed, merge_context):
    check_merge_into_arbitrary_graph(seed, merge_context, on)


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


@pytest.mark.parametrize("seed", range(24))
@backends("reference", "cpu", "interpreter", "triton", "cuda")
def test_verify_equals_the_walk(on, seed):
    rows, config, picked = rows_case(seed)
    gen = torch.Generator().manual_seed(seed)
    eos = torch.tensor([[], [3], [2, 5]][seed % 3], dtype=torch.int32)
    remaining = torch.randint(1, 8, (4,), generator=gen, dtype=torch.int32)
    done = torch.tensor([False, False, False, True])
    limits = {"eos_ids": eos, "remaining": remaining, "done": done}
    got = gsd.verify(on.to(rows), on.to(picked), **on.to(limits), max_path=config.max_path, backend=on.name)
    lengths = []
    for b in range(4):
        path = []
        if not done[b]:
            path = [0]
            while len(path) < remaining[b]:
                token = int(picked[b, path[-1]])
                children = [
                    r
                    for r in range(1, int(rows.num_rows[b]))
                    if rows.parent_rows[b, r] == path[-1] and rows.token_ids[b, r] == token
                ]
                if token in eos.tolist() or not children:
                    break
                path += children
            assert int(got.next_token[b]) == int(picked[b, path[-1]])
        assert got.accepted_rows[b].tolist() == path + [-1] * (config.max_path + 1 - len(path))
        assert int(got.num_accepted[b]) == len(path)
        lengths.append(len(path))
    assert got.accepted_rows.dtype == got.num_accepted.dtype == got.next_token.dtype == torch.int32
    assert lengths[3] == 0 and max(lengths) >= 1


def test_verify_cases_are_not_trivial():
    paths = []
    for seed in range(24):
        rows, config, picked = rows_case(seed)
        accepted = gsd.verify(
            rows,
            picked,
            eos_ids=torch.zeros(0, dtype=torch.int32),
            remaining=torch.full((4,), 99, dtype=torch.int32),
            done=torch.zeros(4, dtype=torch.bool),
            max_path=config.max_path,
            backend="reference",
        )
        paths += accepted.num_accepted.tolist()
    assert {1, 2, 3, 4} <= set(paths), set(paths)


@pytest.mark.parametrize("max_rows", [2, 7, 31, 32, 33, 100])
@pytest.mark.parametrize("style", STYLES)
@backends("cpu", "interpreter", "triton", "cuda")
def test_verify_equals_the_reference(on, max_rows, style):
    config = gsd.GraphConfig(depth=5, width=4, branch=3, max_rows=max_rows)
    check_verify(config, style, STYLES.index(style), on)


@pytest.mark.parametrize("max_rows", [2, 7, 31, 32, 33, 100])
def test_verification_cases_accept_and_finish(max_rows):
    config = gsd.GraphConfig(depth=5, width=4, branch=3, max_rows=max_rows)
    accepted = [check_verify(config, style, STYLES.index(style), ALL["reference"]) for style in STYLES]
    assert torch.cat(accepted).max() > min(2, max_rows - 1) and torch.cat(accepted).min() == 0
