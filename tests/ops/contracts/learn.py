"""What a source was asked, and weights that learn from it, for learn_source."""

from __future__ import annotations

import torch
from ops.contracts.backends import Backend
from torch import Tensor

from gsd_kernels.ops.learn import Asked, Mixture, learn_source

ENTRIES, PATH = 4, 7
COUNTS = {"prior_count": 8.0, "memory": 40.0}


def mixture(seed: int) -> Mixture:
    """Some way into a text."""
    gen = torch.Generator().manual_seed(seed)
    start = torch.tensor([0.0, 0.3, 0.5, 0.7])
    counts = 8 + 5 * torch.rand(ENTRIES, generator=gen)
    shares = counts * torch.rand(ENTRIES, generator=gen) * (start > 0)
    return Mixture(start, shares, counts, shares / counts)


def questions(seed: int, batch: int = 3, branch: int = 4, levels: int = 5) -> tuple[list[Asked], Tensor, Tensor]:
    """Levels of several widths, some without an index; picks that are candidates half of the time."""
    gen = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=gen, dtype=torch.int32)

    def log_probs(*shape: int) -> Tensor:
        scores = (torch.rand(shape, generator=gen) / draw(1, 3, *shape[:-1], 1) / shape[-1]).log()  # some leave a rest
        return torch.where(torch.rand(shape, generator=gen) < 0.15, -torch.inf, scores)

    asked, first = [], 0
    for level in range(levels):
        width = (1, 3, 5)[level % 3]
        ids = (first + torch.arange(width, dtype=torch.int32)).repeat(batch, 1)
        first += width
        ids[:, -1] = torch.where(draw(0, 4, batch) == 0, -1, ids[:, -1])  # padding
        shape = (batch, width, branch)
        index = None if level == 3 else draw(0, ENTRIES, batch, width)
        asked.append(Asked(ids, draw(-1, 8, *shape), log_probs(*shape), index, draw(-1, 8, *shape), log_probs(*shape)))
    nodes = torch.stack([torch.randperm(first + 4, generator=gen)[:PATH] for _ in range(batch)]).int()
    nodes[:, PATH - 2 :] = -2  # the path is shorter
    return asked, nodes, draw(0, 8, batch, PATH)


def check_learning(seed: int, on: Backend, **sizes: int) -> bool:
    """Three steps in a row: every table within 1e-5 of the reference's. Whether anything was learned."""
    ours, theirs = on.to(mixture(seed)), mixture(seed)
    for step in range(3):
        asked, nodes, picked = questions(100 * seed + step, **sizes)
        learn_source(on.to(asked), nodes.to(on.device), picked.to(on.device), ours, **COUNTS, backend=on.name)
        learn_source(asked, nodes, picked, theirs, **COUNTS, backend="reference")
    most = learn_source.tolerance
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.cpu(), want, atol=most, rtol=most)
    return not torch.equal(theirs.weights, mixture(seed).weights)
