"""Paths of tokens → what follows each of their beginnings, and with which probability."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch

from ..model.vocabulary import Vocabulary
from ..records import DecodeState, Sampler
from .base import Level, Proposal


class Trie:
    """A beginning of paths.

    Several of a draft's paths may spell one path here: its probability is the sum of theirs, each of the place where
    the path is complete. These places are told apart by the draft's rows.

    Attributes:
        after: by the next token.
        rows: probabilities of the draft's rows that complete the path, by row.
    """

    def __init__(self) -> None:
        self.after: dict[int, Trie] = {}
        self.rows: dict[int, float] = {}

    def add(self, path: Iterable[tuple[int, int]], probs: Mapping[int, float] | Sequence[float]) -> None:
        """Add a path: its tokens, and of each the row that completes it.

        Args:
            path: tokens and rows.
            probs: probability of the draft's text up to each row, by row.
        """
        node = self
        for token, row in path:
            node = node.after.setdefault(token, Trie())
            node.rows[row] = probs[row]

    @property
    def prob(self) -> float:
        """Of the path, at most 1."""
        return min(1.0, sum(self.rows.values())) if self.rows else 1.0

    def best(self) -> list[tuple[float, int]]:
        """The tokens that follow, best first: log-probabilities, at most 0, and ids."""
        whole = self.prob
        if whole <= 0.0:
            return []
        shares = ((min(1.0, node.prob / whole), token) for token, node in self.after.items())
        return sorted(
            ((math.log(prob), token) for prob, token in shares if prob > 0.0), key=lambda one: (-one[0], one[1])
        )


Places = list[dict[int, Trie]]
"""By sequence, where its nodes are in tries."""


def after_nodes(
    places: Places, level: Level, found: Callable[[int, int, int, list[int]], Trie | None] | None = None
) -> list[list[list[tuple[float, int]]]]:
    """Look up what follows the nodes of a frontier, [B][W], see :meth:`Trie.best`.

    A node whose parent's trie has its token is there, which ``places`` notes; of others ``found`` says where they are,
    by sequence, node, token and the parents of all nodes.
    """
    frontier, best = level.frontier, []
    rows = zip(frontier.node_ids.tolist(), frontier.token_ids.tolist(), level.graph.parents.tolist(), strict=True)
    for b, (nodes, tokens, parents) in enumerate(rows):
        at = places[b]
        for node, token in zip(nodes, tokens, strict=True):
            if node >= 0:
                parent = at.get(parents[node])
                place = None if parent is None else parent.after.get(token)
                if place is None and found is not None:
                    place = found(b, node, token, parents)
                if place is not None:
                    at[node] = place
        best.append([at[node].best() if node in at else [] for node in nodes])
    return best


def emitted_since(state: DecodeState, taken: list[int]) -> list[list[int]]:
    """The tokens behind the first ``taken`` of each sequence, padding included; from here on these are all."""
    lengths, begin = state.out_len.tolist(), min(taken)
    rows = state.tokens[:, begin : max(lengths)].tolist()
    new = [row[at - begin : end - begin] for row, at, end in zip(rows, taken, lengths, strict=True)]
    taken[:] = lengths
    return new


def text_at_end(vocabulary: Vocabulary, tokens: Sequence[int]) -> list[bytes]:
    """The bytes of each of the last tokens, as far back as they are text."""
    last = takewhile(vocabulary.spelled.__contains__, reversed(tokens))
    return [vocabulary.spelled[token] for token in last][::-1]


def proposal_of(
    likely: Sequence[Sequence[list[tuple[float, int]]]], level: Level, sampler: Sampler, **more: Any
) -> Proposal:
    """Of log-probabilities and tokens [B][W][any number], best first: the likeliest with the noise of their places."""
    most, device = max(1, *(len(after) for row in likely for after in row)), level.positions.device
    padded = [[after + [(-math.inf, -1)] * (most - len(after)) for after in row] for row in likely]
    both = torch.tensor(padded, dtype=torch.float64, device="cpu")  # [B, W, K, 2]; exact for ids
    tokens, log_probs = both[..., 1].to(device, torch.int32), both[..., 0].to(device, torch.float32)
    if not sampler.greedy:
        log_probs = sampler.perturb(tokens, log_probs, level.positions)
        log_probs, order = log_probs.sort(dim=-1, descending=True, stable=True)
        tokens = tokens.gather(-1, order)
    branch = level.graph.branch
    return Proposal(tokens[..., :branch].contiguous(), log_probs[..., :branch].contiguous(), **more)
