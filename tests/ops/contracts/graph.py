"""merge, flatten and verify: problems, and equality with the reference bit for bit."""

from __future__ import annotations

import torch
from graphs import candidates, drafted, tails, wild
from hypothesis import strategies as st
from ops.contracts.backends import Backend, assert_bit_equal, check_equal
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels.config import MAX_CONTEXT

GRAPHS = {
    "graph": (gsd.GraphConfig(depth=4, width=4, branch=3, max_rows=32, merge_context=1), 6),
    "context-0": (gsd.GraphConfig(depth=4, width=5, branch=3, max_rows=33, merge_context=0), 6),
    "context-3": (gsd.GraphConfig(depth=5, width=3, branch=2, max_rows=17, merge_context=3), 2),
    "tree": (gsd.GraphConfig(depth=3, width=7, branch=5, max_rows=63, merge_context=-1), 9),
    "chain": (gsd.GraphConfig.preset("chain", depth=7), 3),
    "pruned": (gsd.GraphConfig(depth=4, width=6, branch=4, max_rows=40, sibling_ratio=0.3, min_prob=0.02), 12),
    "one-level": (gsd.GraphConfig(depth=1, width=1, branch=1, max_rows=2), 3),
    "rows-left-over": (gsd.GraphConfig(depth=2, width=2, branch=2, max_rows=100), 4),
    "shallow-path": (gsd.GraphConfig(depth=5, width=4, branch=2, max_rows=30, max_path=3), 4),
}
CUDA_GRAPHS = [
    gsd.GraphConfig(depth=5, width=4, branch=3, max_rows=32),
    gsd.GraphConfig(depth=6, width=8, branch=4, max_rows=64, merge_context=0),
    gsd.GraphConfig(depth=3, width=5, branch=5, max_rows=63, merge_context=2, sibling_ratio=0.2, min_prob=0.05),
    gsd.GraphConfig(depth=2, width=30, branch=32, max_rows=128, merge_context=0),
    gsd.GraphConfig.preset("chain"),
    gsd.GraphConfig.preset("tree"),
]


@st.composite
def configs(draw):
    depth, width, branch = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    max_rows = draw(st.integers(2, 40))
    return gsd.GraphConfig(
        depth=depth,
        width=width,
        branch=branch,
        max_rows=max_rows,
        max_path=draw(st.none() | st.integers(1, max_rows - 1)),
        merge_context=draw(st.integers(-1, 3)),
        sibling_ratio=draw(st.sampled_from([0.0, 0.0, 0.2, 1.0])),
        min_prob=draw(st.sampled_from([0.0, 0.0, 0.05])),
    )


def check_graph(
    config: gsd.GraphConfig, style: str, vocab: int, seed: int, on: Backend, batch: int = 2
) -> tuple[gsd.TokenGraph, gsd.Rows]:
    """Every level's graph and frontier, then the rows, bit for bit. Returns the reference's graph and rows."""

    def levels(backend: str, device: str) -> tuple[gsd.TokenGraph, list[tuple[gsd.TokenGraph, gsd.Frontier]]]:
        seen: list[tuple[gsd.TokenGraph, gsd.Frontier]] = []
        graph = drafted(
            config,
            batch=batch,
            vocab=vocab,
            style=style,
            seed=seed,
            backend=backend,
            device=device,
            on_level=lambda g, _level, _f, _t, _lp, nxt: seen.append((g.clone(), nxt)),
        )
        return graph, seen

    ours, got = levels(on.name, on.device)
    theirs, expected = levels("reference", on.reference_device)
    for (graph_a, next_a), (graph_b, next_b) in zip(got, expected, strict=True):
        assert_bit_equal(graph_a, graph_b)
        assert_bit_equal(next_a, next_b)
    return theirs, check_flatten(theirs, ours, config.max_rows, config.max_path, on)


def check_flatten(graph: gsd.TokenGraph, same: gsd.TokenGraph, max_rows: int, max_path: int, on: Backend) -> gsd.Rows:
    """``same`` is the graph as the backend made it."""
    expected = gsd.flatten(graph, max_rows, max_path, backend="reference")
    assert_bit_equal(gsd.flatten(same, max_rows, max_path, backend=on.name), expected)
    return expected


def check_flatten_of_any_graph(seed: int, max_rows: int, max_path: int, on: Backend) -> None:
    """Edges from anywhere to anywhere, circles and nodes that do not exist among them, of any log-probability."""
    gen = torch.Generator().manual_seed(seed)
    graph = gsd.TokenGraph.empty(2, gsd.GraphConfig(depth=3, width=3, branch=3), "cpu")
    batch, nodes, branch = graph.edge_targets.shape
    graph.token_ids[:] = torch.randint(-2, 9, (batch, nodes), generator=gen, dtype=torch.int32)
    graph.edge_targets[:] = torch.randint(-2, nodes + 3, (batch, nodes, branch), generator=gen, dtype=torch.int32)
    graph.edge_log_probs[:] = wild((batch, nodes, branch), gen)
    rows, _ = check_equal(gsd.flatten, on, graph, max_rows, max_path)
    for b, count in enumerate(rows.num_rows.tolist()):
        parents, scores = rows.parent_rows[b, :count].tolist(), rows.scores[b, :count].tolist()
        assert parents[0] == -1 and all(0 <= parent < row for row, parent in enumerate(parents) if row)
        assert scores == sorted(scores, reverse=True) and scores[0] == 0.0


def agreeing_target(rows: gsd.Rows, vocab: int, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Target picks that often equal the drafted tokens, and verify's other arguments."""
    gen = torch.Generator().manual_seed(seed)
    batch, num_rows = rows.token_ids.shape
    sampled = torch.randint(0, vocab, (batch, num_rows), generator=gen, dtype=torch.int32)
    for b in range(batch):
        for row in range(1, int(rows.num_rows[b])):
            if torch.rand((), generator=gen) < 0.7:
                sampled[b, rows.parent_rows[b, row]] = rows.token_ids[b, row]
    return sampled, {
        "eos_ids": torch.arange(seed % 3, dtype=torch.int32),
        "remaining": torch.randint(1, 9, (batch,), generator=gen, dtype=torch.int32),
    }


def rows_case(seed: int) -> tuple[gsd.Rows, gsd.GraphConfig, Tensor, dict[str, Tensor]]:
    """Rows of a random graph, how it was drafted, and what :func:`agreeing_target` gives for them."""
    max_rows = (2, 7, 31, 32, 33, 100)[seed // 4 % 6]
    config = gsd.GraphConfig(depth=5, width=4, branch=3, max_rows=max_rows, merge_context=seed % 4 - 1)
    graph = drafted(config, batch=4, vocab=6, seed=seed, style=("random", "repeat", "sparse")[seed % 3])
    rows = gsd.flatten(graph, config.max_rows, config.max_path, backend="reference")
    return rows, config, *agreeing_target(rows, 6, seed)


def check_merge_into_arbitrary_graph(seed: int, merge_context: int, on: Backend) -> None:
    """Many nodes of one token whose contexts agree to all lengths, tied scores: what drafting reaches rarely."""
    gen = torch.Generator().manual_seed(seed)
    config = gsd.GraphConfig(depth=4, width=6, branch=4)
    graph = gsd.TokenGraph.empty(2, config, "cpu")
    batch = graph.token_ids.shape[0]
    graph.reset(torch.tensor([1, 0], dtype=torch.int32), tails(batch, 2, gen))
    count = 45

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, (batch, *shape), generator=gen, dtype=torch.int32)

    graph.token_ids[:, :count] = integers(2, count)
    lengths = integers(12, count, 1)
    contexts = torch.where(torch.arange(MAX_CONTEXT) < lengths, integers(2, count, MAX_CONTEXT), -1)
    graph.contexts[:, :count] = contexts.int()
    graph.scores[:, :count] = -(integers(6, count) / 2)
    graph.parents[:, 1:count] = torch.minimum(integers(count, count - 1), torch.arange(count - 1)).int()
    graph.depths[:, :count] = integers(5, count)
    graph.expanded[:, :count] = integers(2, count).bool()
    graph.expanded.scatter_(1, graph.parents[:, 1:count].long(), True)  # as drafting does
    graph.num_nodes[:] = torch.tensor([count, count // 2])
    frontier = torch.stack([torch.randperm(count // 2, generator=gen)[:6] for _ in range(batch)]).int()
    frontier[:, 4] = -1
    tokens, log_probs = candidates("ties", 4, (batch, 6, config.branch), gen)
    level = (frontier, tokens, log_probs)
    rules = {"level": 2, "width": 6, "merge_context": merge_context, "log_min_prob": -3.0}
    check_equal(gsd.merge, on, graph, *level, **rules)
