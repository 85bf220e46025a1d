"""merge, flatten, verify and select_rows: sequential oracles, and bits of drafted graphs on every backend."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from graphs import STYLES, drafted
from hypothesis import given, settings
from hypothesis import strategies as st
from kept import program
from ops.contracts.backends import ALL, assert_bit_equal, backends, cases, check_equal, needs_cpu
from ops.contracts.step import CONFIG, GRAPHS, agreeing_target, check_graph, configs, posterior, problem, rows_case

import gsd_kernels as gsd
from gsd_kernels.graph import unpack_bits
from gsd_kernels.ops.select_rows import FEATURES, LogisticPosterior, select_rows, update_edge_model

pytestmark = pytest.mark.quick

oracle = program("gsd_in_100_lines")


def oracle_graphs(graph, config, frontiers):
    tails = graph.contexts[:, 0].tolist()
    graphs = [oracle.Graph([int(graph.token_ids[b, 0])], tails[b]) for b in range(graph.token_ids.shape[0])]
    rules = config.width, config.merge_context, config.log_sibling_ratio, config.log_min_prob
    for frontier, tokens, log_probs, _ in frontiers:
        for b, g in enumerate(graphs):
            yield b, g, oracle.merge(g, frontier[b].tolist(), tokens[b].tolist(), log_probs[b].numpy(), *rules)


@settings(max_examples=100, deadline=None)
@given(configs(), st.sampled_from(STYLES), st.integers(2, 12), st.integers(0, 10**6))
def test_graph_and_rows_equal_the_sequential_oracles(config, style, vocab, seed):
    levels = []
    note = lambda _g, _l, f, t, lp, nxt: levels.append((f.clone(), t, lp, nxt))  # noqa: E731
    graph = drafted(config, vocab=vocab, style=style, seed=seed, on_level=note)
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
        paths: list[set[int]] = []
        for row, (_, parent, _, _) in enumerate(flat):
            paths.append({row} | (paths[parent] if parent >= 0 else set()))
        mask = unpack_bits(rows.ancestor_mask[b], config.max_rows)
        assert [set(of.nonzero().flatten().tolist()) for of in mask[:n]] == paths


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


EVERY = {f"{name}-{style}": (*GRAPHS[name], style, 5) for name, style in itertools.product(GRAPHS, STYLES)}
FEW = {  # of each one or two styles, and a sixth of all
    f"{name}-{style}": (*GRAPHS[name], style, 1) for name in GRAPHS for style in STYLES[len(name) % 3 :: 3]
}
LARGE = {  # several blocks of rows and columns, then what takes several threads
    "many candidates": (gsd.GraphConfig(depth=4, width=26, branch=5, max_rows=128, merge_context=1), 6, "random", 1),
    "largest": (gsd.GraphConfig(depth=3, width=63, branch=8, max_rows=128, merge_context=1), 6, "wild", 2),
    "widest branch": (gsd.GraphConfig(depth=2, width=30, branch=32, max_rows=128, merge_context=0), 64, "ties", 2),
    "large batch": (gsd.GraphConfig(depth=5, width=8, branch=4, max_rows=64), 9, "ties", 67),
}


@cases(
    "case",
    {"cpu": LARGE.items(), "interpreter": FEW.items(), **dict.fromkeys(("triton", "cuda"), (EVERY | LARGE).items())},
)
def test_a_drafted_graph_its_rows_and_their_acceptance(on, case):
    config, vocab, style, batch = case
    graph, rows = check_graph(config, style, vocab, STYLES.index(style), on, batch)
    assert int(graph.num_merges.sum()) == 0 or config.merge_context >= 0
    check_acceptance(rows, vocab, batch, config, on)


def check_acceptance(rows, vocab, seed, config, on):
    sampled, arguments = agreeing_target(rows, vocab, seed)
    for done in (torch.zeros(len(sampled), dtype=torch.bool), torch.arange(len(sampled)) == 0):
        check_equal(gsd.verify, on, on.to(rows), sampled, **arguments, done=done, max_path=config.max_path)


@needs_cpu
@settings(max_examples=100, deadline=None)
@given(configs(), st.sampled_from(STYLES), st.integers(2, 12), st.integers(0, 10**6))
def test_any_compiled_step(config, style, vocab, seed):
    _, rows = check_graph(config, style, vocab, seed, ALL["cpu"])
    check_acceptance(rows, vocab, seed, config, ALL["cpu"])


@backends("reference", "cpu")
def test_verify_equals_the_walk(on):
    lengths = set()
    for seed in range(24):
        rows, config, picked, limits = rows_case(seed)
        done, (eos, remaining) = torch.arange(4) == 3, limits.values()
        got = gsd.verify(rows, picked, **limits, done=done, max_path=config.max_path, backend=on.name)
        for b in range(4):
            path = [] if done[b] else [0]
            while 0 < len(path) < remaining[b]:
                token = int(picked[b, path[-1]])
                children = [
                    r
                    for r in range(1, int(rows.num_rows[b]))
                    if rows.parent_rows[b, r] == path[-1] and rows.token_ids[b, r] == token
                ]
                if token in eos.tolist() or not children:
                    break
                path += children
            assert not path or int(got.next_token[b]) == int(picked[b, path[-1]])
            assert got.accepted_rows[b].tolist() == path + [-1] * (config.max_path + 1 - len(path))
            assert int(got.num_accepted[b]) == len(path)
            lengths.add(len(path))
    assert lengths >= {0, 1, 2, 3, 4}


LIMITS = {"max_rows": CONFIG.max_rows, "max_path": CONFIG.max_path}
AS_CLAIMED = LogisticPosterior(
    torch.tensor([0.0, 1.0, *[0.0] * (FEATURES - 2)], dtype=torch.float64),
    torch.eye(FEATURES, dtype=torch.float64),
    torch.ones(FEATURES, dtype=torch.float64),
)
"""By which an edge is right as often as its source says."""
ONE = torch.ones(1, dtype=torch.int32)


def pair_graph(first: float, second: float) -> gsd.TokenGraph:
    """The root with two children, tokens 5 and 6, of these probabilities."""
    config = gsd.GraphConfig(depth=1, width=2, branch=2, max_rows=3)
    graph = gsd.TokenGraph.empty(1, config, "cpu")
    graph.reset(ONE, torch.full((1, 8), -1, dtype=torch.int32))
    tokens, log_probs = torch.tensor([[[5, 6]]], dtype=torch.int32), torch.tensor([[[first, second]]]).log()
    gsd.merge(graph, graph.root_frontier(), tokens, log_probs, level=0, width=2, merge_context=-1, backend="reference")
    return graph


@backends("reference", "cpu")
def test_probabilities_are_what_the_sources_claim_where_the_model_says_so(on):
    """And rows are in their order: weights that favour second candidates put them first."""

    def select(weights: LogisticPosterior, max_rows: int) -> gsd.Rows:
        return select_rows(pair_graph(0.5, 0.3), ONE, weights, None, max_rows=max_rows, max_path=1, backend=on.name)

    rows = select(AS_CLAIMED, 3)
    assert rows.token_ids.tolist() == [[1, 5, 6]] and rows.parent_rows.tolist() == [[-1, 0, 0]]
    assert rows.scores.exp().tolist()[0] == pytest.approx([1.0, 0.5, 0.3], rel=1e-5)
    assert select(AS_CLAIMED, 2).token_ids.tolist() == [[1, 5]]
    second = AS_CLAIMED._replace(weights=torch.tensor([-3.0, 0.0, 6.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    assert select(second, 3).token_ids.tolist() == [[1, 6, 5]]


@given(st.integers(0, 10_000), st.sampled_from(STYLES), st.data())
@settings(max_examples=40, deadline=None)
def test_the_count_with_most_tokens_a_second(seed, style, data):
    """Probabilities fall along paths, siblings sum to their parent at most, and nothing but the count is cut."""
    graph, before = problem(seed, style)
    every = select_rows(graph, before, posterior(seed), None, **LIMITS)
    probs = every.scores.double().exp()
    for row, parents in zip(probs.tolist(), every.parent_rows.tolist(), strict=True):
        for parent, some in enumerate(row):
            assert sum(p for p, of in zip(row, parents, strict=True) if of == parent) <= some + 1e-5
    parts = data.draw(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30))
    seconds = 0.1 + torch.tensor(parts, dtype=torch.float64).cumsum(0)
    chosen = select_rows(graph, before, posterior(seed), seconds, **LIMITS, row_bonus=0.02)
    count = chosen.token_ids.shape[1]
    assert_bit_equal(chosen, every.first(count))
    rates = ((probs.mean(0) + 0.02).cumsum(0)[: len(seconds)] / seconds[: probs.shape[1]]).tolist()
    assert count <= len(rates) and rates[count - 1] == pytest.approx(max(rates))


@backends("reference", "cpu")
def test_what_is_learned(on):
    """Edges up to the right one, whether they had a row or not; nothing of finished sequences."""
    graph = pair_graph(0.5, 0.3)

    def learned(node: int, token: int, graph: gsd.TokenGraph = graph) -> LogisticPosterior:
        steps = torch.tensor([[node, -2]], dtype=torch.int32), torch.tensor([[token, 0]], dtype=torch.int32)
        return update_edge_model(graph, ONE, *steps, AS_CLAIMED, backend=on.name)

    def probs(found: LogisticPosterior) -> list[float]:
        return select_rows(graph, ONE, found, None, max_rows=3, max_path=1).scores.exp().sort(-1).values[0].tolist()

    assert probs(learned(0, 5))[1] > 0.5 > probs(learned(0, 7))[1]
    assert torch.equal(learned(-2, 5).weights, AS_CLAIMED.weights)
    # Behind the right one nothing is learned: whatever the second edge is, it is the same.
    other = replace(graph, edge_log_probs=torch.where(graph.edge_log_probs < math.log(0.4), -5.0, graph.edge_log_probs))
    assert torch.equal(learned(0, 5, other).weights, learned(0, 5).weights)
    assert not torch.equal(learned(0, 6, other).weights, learned(0, 6).weights)
    assert learned(0, 6).weights[2] > 0 > learned(0, 7).weights[2], "the second one was right, or none"
