"""Graphs, posteriors and paths for select_rows and update_edge_model."""

from __future__ import annotations

import torch
from graphs import drafted
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels.ops.select_rows import FEATURES, LogisticPosterior

CONFIG = gsd.GraphConfig(depth=4, width=4, branch=3, max_rows=24, merge_context=1)
VOCAB = 8


def posterior(seed: int = 0) -> LogisticPosterior:
    """Some way into a text."""
    gen = torch.Generator().manual_seed(seed)
    prior = 0.1 + torch.rand(FEATURES, generator=gen, dtype=torch.float64)
    root = torch.randn(FEATURES, FEATURES, generator=gen, dtype=torch.float64)
    covariance = root @ root.T
    scale = (0.5 * prior / covariance.diagonal()).sqrt()
    weights = torch.randn(FEATURES, generator=gen, dtype=torch.float64)
    return LogisticPosterior(weights, covariance * scale[:, None] * scale, prior)


def problem(seed: int, style: str = "random", batch: int = 3) -> tuple[gsd.TokenGraph, Tensor]:
    """A graph, and what the step before brought: nothing, one token or several."""
    graph = drafted(CONFIG, batch=batch, vocab=VOCAB, style=style, seed=seed)
    return graph, torch.arange(batch, dtype=torch.int32) * (1 + seed % 4)


def path(graph: gsd.TokenGraph, seed: int) -> tuple[Tensor, Tensor]:
    """Nodes of accepted paths of any length, none among them, and the picks after them: int32 [B, 5] each."""
    gen = torch.Generator().manual_seed(seed)
    batch = graph.token_ids.shape[0]
    nodes, picked = torch.full((batch, 5), -2, dtype=torch.int32), torch.zeros(batch, 5, dtype=torch.int32)
    for b in range(batch):
        node = 0
        for place in range((seed + b) % 6):
            nodes[b, place] = node
            targets = [t for t in graph.edge_targets[b, node].tolist() if t >= 0]
            picked[b, place] = torch.randint(0, VOCAB, (1,), generator=gen)
            if not targets:
                break
            node = targets[int(torch.randint(0, len(targets), (1,), generator=gen))]
            picked[b, place] = graph.token_ids[b, node]
    return nodes, picked
