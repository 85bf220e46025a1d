"""Figures that a step gives a policy of the candidates after its accepted nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gsd_kernels.ops.learn import Asked

Held = tuple[Tensor, Tensor, Tensor]
"""A level: node_ids int32 [B, W], tokens int32 and log_probs float32 [B, W, K]."""


@dataclass(frozen=True)
class Figures:
    """How probable the sources held the candidates of a step, level by level.

    Attributes:
        nodes, tokens: int32 [B, P], the nodes of the accepted path, and what the target picked after each.
        levels: by pool.
    """

    nodes: Tensor
    tokens: Tensor
    levels: Mapping[str, Sequence[Held]]

    def tensors(self) -> list[Tensor]:
        """All of them, in order; of four bytes an element."""
        return [self.nodes, self.tokens, *(part for pool in self.levels.values() for level in pool for part in level)]

    def read_from(self, values: Tensor) -> Figures:
        """The same figures out of the elements of :meth:`tensors`, side by side as int32 [n] in the host's memory."""
        tensors = self.tensors()
        pieces = values.split([tensor.numel() for tensor in tensors])
        parts = (piece.view(t.dtype).view(t.shape) for piece, t in zip(pieces, tensors, strict=True))
        nodes, tokens = next(parts), next(parts)
        levels = {name: [(next(parts), next(parts), next(parts)) for _ in pool] for name, pool in self.levels.items()}
        return Figures(nodes, tokens, levels)

    def profiles(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """By pool, of figures in the host's memory: how probable the candidates of accepted nodes were held, and picks.

        Returns:
            Probabilities float32 [n, K] and hits bool [n, K] of the n accepted nodes that were expanded, one sequence
            after the other.
        """
        paths, picked = self.nodes.tolist(), self.tokens.tolist()
        return {name: picks(pool, paths, picked) for name, pool in self.levels.items()}


def as_one(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of four bytes an element as one, int32 [n]."""
    return torch.cat([tensor.contiguous().view(torch.int32).flatten() for tensor in tensors])


def picks(
    levels: Sequence[Sequence[Tensor]], paths: Sequence[Sequence[int]], picked: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Pick of levels (node_ids [B, W], tokens and log_probs [B, W, K]) what follows the nodes [B, P] of accepted paths.

    Returns:
        Probabilities float32 [n, K] and which candidates were ``picked`` [B, P], bool [n, K], by sequence and place.
    """
    places = [{node: place for place, node in enumerate(path) if node >= 0} for path in paths]
    order: list[tuple[int, int]] = []  # sequence and place of what is found
    probs, hits = [], []
    for node_ids, tokens, log_probs in levels:
        held = [
            (b, places[b][node], w)
            for b, row in enumerate(node_ids.tolist())  # a list: of many nodes a few are on the path
            for w, node in enumerate(row)
            if node in places[b]
        ]
        if held:
            sequences, where, nodes = (list(column) for column in zip(*held, strict=True))
            target = np.array([picked[b][place] for b, place, _ in held])
            probs.append(log_probs.numpy()[sequences, nodes])
            hits.append(tokens.numpy()[sequences, nodes] == target[:, None])
            order += zip(sequences, where, strict=True)
    if not order:
        none = np.zeros((0, levels[0][1].shape[2]))
        return none.astype(np.float32), none.astype(bool)
    ascending = sorted(range(len(order)), key=order.__getitem__)
    return np.exp(np.concatenate(probs)[ascending]), np.concatenate(hits)[ascending]


def side_by_side(asked: Sequence[Asked]) -> Asked:
    """Join what one source proposed at several levels into one level."""
    if len(asked) == 1:
        return asked[0]
    parts = (
        (a.node_ids, a.tokens, a.log_probs, torch.zeros_like(a.node_ids) if a.index is None else a.index) for a in asked
    )
    return Asked(*(torch.cat(part, 1) for part in zip(*parts, strict=True)))
