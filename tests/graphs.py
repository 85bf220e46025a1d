"""Random and adversarial token graphs, shared by the tests of the graph ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels.config import MAX_CONTEXT

STYLES = ("random", "alternating", "repeat", "ties", "sparse", "wild")
INF = float("inf")
WILD = (-INF * 0, INF, -INF, 0.0, -0.0, 1e-6, 2.5, 1e30, -1e30, -3.4e38, 1e-40, -1e-40, -0.5, -1.0)
"""Log-probabilities that no distribution has, and a few that one may have."""


def candidates(style: str, vocab: int, shape: tuple[int, int, int], gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """Distinct tokens and log-probabilities [B, W, K] in the given style."""
    batch, width, branch = shape
    tokens = torch.rand(batch, width, max(vocab, branch), generator=gen).argsort(-1)[..., :branch].to(torch.int32)
    log_probs = torch.randn(shape, generator=gen).log_softmax(-1).sort(-1, descending=True).values
    if style == "alternating":
        tokens = (torch.arange(branch).expand(shape) % 2 + torch.arange(branch).expand(shape) // 2 * 2).int()
    elif style == "repeat":
        tokens = torch.arange(branch).expand(shape).clone().int()
        log_probs = torch.full(shape, -0.5)
    elif style == "ties":
        log_probs = (log_probs * 2).round() / 2
        log_probs = torch.where(torch.rand(shape, generator=gen) < 0.2, -0.0, log_probs)
    elif style == "sparse":
        log_probs = torch.where(torch.rand(shape, generator=gen) < 0.4, float("-inf"), log_probs)
        tokens = torch.where(torch.rand(shape, generator=gen) < 0.1, -1, tokens)
        tokens = torch.where(torch.rand(shape, generator=gen) < 0.1, 0, tokens)  # duplicates
    elif style == "wild":
        tokens = torch.randint(-2, vocab, shape, generator=gen, dtype=torch.int32)
        log_probs = wild(shape, gen)
    return tokens.contiguous(), log_probs.float().contiguous()


def wild(shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    """Of :data:`WILD`, float32."""
    return torch.tensor(WILD)[torch.randint(0, len(WILD), shape, generator=gen)]


def tails(batch: int, vocab: int, gen: torch.Generator) -> Tensor:
    """Emitted text before the root, of random lengths: int32 [B, C]."""
    tail = torch.randint(0, vocab, (batch, MAX_CONTEXT), generator=gen, dtype=torch.int32)
    lengths = torch.randint(0, MAX_CONTEXT + 1, (batch, 1), generator=gen)
    return torch.where(torch.arange(MAX_CONTEXT) < lengths, tail, -1)


def drafted(
    config: gsd.GraphConfig,
    *,
    batch: int = 2,
    vocab: int = 8,
    style: str = "random",
    seed: int = 0,
    backend: str = "reference",
    device: str = "cpu",
    on_level: Callable[[gsd.TokenGraph, int, Tensor, Tensor, Tensor, gsd.Frontier], None] | None = None,
) -> gsd.TokenGraph:
    """A graph of ``config`` grown with random candidates; ``on_level`` sees every merge's inputs and output."""
    gen = torch.Generator().manual_seed(seed)
    graph = gsd.TokenGraph.empty(batch, config, device)
    root = torch.randint(0, vocab, (batch,), generator=gen, dtype=torch.int32)
    graph.reset(root.to(device), tails(batch, vocab, gen).to(device))
    frontier = graph.root_frontier()
    for level in range(config.depth):
        shape = (batch, frontier.shape[1], config.branch)
        tokens, log_probs = (x.to(device) for x in candidates(style, vocab, shape, gen))
        result = gsd.merge(
            graph,
            frontier,
            tokens,
            log_probs,
            level=level,
            width=config.width,
            config=config,
            backend=backend,
        )
        if on_level is not None:
            on_level(graph, level, frontier, tokens, log_probs, result)
        frontier = result.node_ids
    return graph
