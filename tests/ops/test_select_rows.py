"""Rows by throughput, and the posterior of edges: the reference's on every backend, and by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from graphs import STYLES
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.contracts.backends import assert_bit_equal, backends
from ops.contracts.select_rows import CONFIG, path, posterior, problem

import gsd_kernels as gsd
from gsd_kernels.ops.select_rows import FEATURES, LogisticPosterior, select_rows, update_edge_model

pytestmark = pytest.mark.quick

LIMITS = {"max_rows": CONFIG.max_rows, "max_path": CONFIG.max_path}
AS_CLAIMED = LogisticPosterior(
    torch.tensor([0.0, 1.0, *[0.0] * (FEATURES - 2)], dtype=torch.float64),
    torch.eye(FEATURES, dtype=torch.float64),
    torch.ones(FEATURES, dtype=torch.float64),
)
"""By which an edge is right as often as its source says."""


def pair_graph(first: float, second: float) -> gsd.TokenGraph:
    """The root with two children, tokens 5 and 6, of these probabilities."""
    config = gsd.GraphConfig(depth=1, width=2, branch=2, max_rows=3)
    graph = gsd.TokenGraph.empty(1, config, "cpu")
    graph.reset(torch.ones(1, dtype=torch.int32), torch.full((1, 8), -1, dtype=torch.int32))
    tokens, log_probs = torch.tensor([[[5, 6]]], dtype=torch.int32), torch.tensor([[[first, second]]]).log()
    gsd.merge(graph, graph.root_frontier(), tokens, log_probs, level=0, width=2, merge_context=-1, backend="reference")
    return graph


ONE = torch.ones(1, dtype=torch.int32)


@pytest.mark.parametrize("style", STYLES)
@backends("cpu")
def test_rows_equal_the_reference(on, style):
    for seed in range(12):
        graph, before = problem(seed, style, batch=1 + seed % 4)
        seconds = None if seed % 3 == 0 else 1.0 + 0.05 * torch.arange(1 + 2 * seed, dtype=torch.float64)
        arguments = (graph, before, posterior(seed), seconds)
        ours = select_rows(*arguments, **LIMITS, row_bonus=0.03, backend=on.name)
        assert_bit_equal(ours, select_rows(*arguments, **LIMITS, row_bonus=0.03, backend="reference"))


@backends("cpu")
def test_beliefs_equal_the_reference(on):
    for seed in range(24):
        graph, before = problem(seed, batch=1 + seed % 4)
        known, steps = posterior(seed), path(graph, seed)
        kept = [tensor.clone() for tensor in known]
        ours = update_edge_model(graph, before, *steps, known, process_noise=0.01, backend=on.name)
        theirs = update_edge_model(graph, before, *steps, known, process_noise=0.01, backend="reference")
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)
        assert all(torch.equal(tensor, old) for tensor, old in zip(known, kept, strict=True)), "not in place"


@backends("reference", "cpu")
def test_probabilities_are_what_the_sources_claim_where_the_model_says_so(on):
    rows = select_rows(pair_graph(0.5, 0.3), ONE, AS_CLAIMED, None, max_rows=3, max_path=2, backend=on.name)
    assert rows.token_ids.tolist() == [[1, 5, 6]]
    assert rows.scores.exp().tolist()[0] == pytest.approx([1.0, 0.5, 0.3], rel=1e-5)
    fewer = select_rows(pair_graph(0.5, 0.3), ONE, AS_CLAIMED, None, max_rows=2, max_path=1, backend=on.name)
    assert fewer.token_ids.tolist() == [[1, 5]]


@backends("reference", "cpu")
def test_rows_are_in_the_order_of_their_probabilities(on):
    """Weights that favour second candidates put them first."""
    second = AS_CLAIMED._replace(weights=torch.tensor([-3.0, 0.0, 6.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    rows = select_rows(pair_graph(0.5, 0.3), ONE, second, None, max_rows=3, max_path=1, backend=on.name)
    assert rows.token_ids.tolist() == [[1, 6, 5]] and rows.parent_rows.tolist() == [[-1, 0, 0]]


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
def test_of_equal_counts_the_fewest_rows(on):
    nothing = AS_CLAIMED._replace(weights=torch.tensor([-200.0, *[0.0] * 6], dtype=torch.float64))
    flat = torch.ones(3, dtype=torch.float64)
    arguments = {"max_rows": 3, "max_path": 1, "backend": on.name}
    assert select_rows(pair_graph(0.5, 0.3), ONE, nothing, flat, **arguments).num_rows.tolist() == [1]
    assert select_rows(pair_graph(0.5, 0.3), ONE, nothing, flat, row_bonus=0.01, **arguments).num_rows.tolist() == [3]


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


def test_often_right_is_believed_and_becomes_certain():
    graph, found = pair_graph(0.2, 0.1), AS_CLAIMED
    steps = torch.tensor([[0]], dtype=torch.int32), torch.tensor([[5]], dtype=torch.int32)
    for _ in range(300):
        found = update_edge_model(graph, ONE, *steps, found, process_noise=1e-4)
    assert select_rows(graph, ONE, found, None, max_rows=2, max_path=1).scores.exp()[0, 1] > 0.9
    variances = found.covariance.diagonal()
    assert (variances <= found.prior + 1e-12).all() and torch.linalg.eigvalsh(found.covariance)[0] > 0
    assert variances.sum() < 0.9 * found.prior.sum()
