"""Paths of tokens → what follows each of their beginnings, and with which probability."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping


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

    def add(self, path: Iterable[tuple[int, int]], probs: Mapping[int, float]) -> None:
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
