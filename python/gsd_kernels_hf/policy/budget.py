"""How many of a step's rows are worth their time.

A step takes ``seconds(n)`` with n rows and brings ``tokens(n)``. Of a decoder that makes ``rate`` tokens a second in
the long run, the best n is where ``tokens(n) − rate · seconds(n)`` is largest: a row must bring its tokens faster than
all else does (the renewal-reward theorem's price of time). Text that the sources are sure of gets many rows, other
text few, step by step, which no fixed shape can do.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from gsd_kernels import Acceptance, Rows

EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95)  # between bins of a token's probability
USUAL = (0.01, 0.03, 0.07, 0.15, 0.27, 0.42, 0.6, 0.78, 0.9, 0.98)  # a probability of each bin
BINS = len(USUAL)
DEEPEST = 2  # parents are told apart by depth: the root, a row behind it, and all deeper ones
BELIEF = 16.0  # rows that the sources' own probabilities count for in each cell
MEMORY = 0.99  # of what was counted in a cell, a row
PRIOR = [BELIEF * prob for prob in USUAL]  # rows accepted, before anything was seen
LEAST = -30.0  # of logarithms


class RowOdds:
    """How often a row is accepted whose parent was, by its token's probability and its parent's depth.

    A path's probability is a product, as if a token said nothing of the next one; but where the sources were right
    once, they are again. Siblings share what their parent has, so rows are no likelier together than one of them is.
    """

    def __init__(self) -> None:
        self.accepted = [list(PRIOR) for _ in range(1 + DEEPEST)]
        self.expected = [list(row) for row in self.accepted]
        self.ratios = [[1.0] * BINS for _ in range(1 + DEEPEST)]

    def of(self, scores: Sequence[float], parents: Sequence[int]) -> list[float]:
        """Probabilities that rows are accepted.

        Args:
            scores: of rows, the root first: logarithms of their paths' probabilities.
            parents: of rows, by place, before their children; −1 of the root and of padding.
        """
        odds, depths, ratios = [1.0], [0], self.ratios
        for score, parent in zip(scores[1:], parents[1:], strict=True):
            if parent < 0:
                odds.append(0.0)
                depths.append(0)
                continue
            depth, prob = depths[parent], _prob(score - scores[parent])
            odds.append(odds[parent] * min(prob * ratios[depth][bisect(EDGES, prob)], 1.0))
            depths.append(depth + 1 if depth < DEEPEST else depth)
        return odds

    def observe(self, scores: Sequence[float], parents: Sequence[int], path: Sequence[int]) -> None:
        """Rows of a step, as above, of which those of ``path``, the root first, were accepted."""
        depths = {row: min(depth, DEEPEST) for depth, row in enumerate(path)}
        for row in range(1, len(scores)):
            parent = parents[row]
            if parent in depths:
                depth, prob = depths[parent], _prob(scores[row] - scores[parent])
                cell = bisect(EDGES, prob)
                accepted, expected = self.accepted[depth], self.expected[depth]
                expected[cell] = PRIOR[cell] + MEMORY * (expected[cell] - PRIOR[cell]) + prob
                accepted[cell] = PRIOR[cell] + MEMORY * (accepted[cell] - PRIOR[cell]) + (row in depths)
                self.ratios[depth][cell] = accepted[cell] / expected[cell]

    def as_dict(self) -> dict[str, Any]:
        """All of it, for the disk."""
        return {"accepted": [list(row) for row in self.accepted], "expected": [list(row) for row in self.expected]}

    def load(self, data: Mapping[str, Any]) -> None:
        """What :meth:`as_dict` gave.

        Raises:
            ValueError, KeyError, TypeError: it is not that; nothing was taken over.
        """
        accepted, expected = ([[float(n) for n in row] for row in data[part]] for part in ("accepted", "expected"))
        for table in (accepted, expected):
            counts = [n for row in table for n in row if 0.0 < n < 1e9]
            if [len(row) for row in table] != [BINS] * (1 + DEEPEST) or len(counts) != BINS * (1 + DEEPEST):
                raise ValueError("row odds: counts of another number, or none")
        self.accepted, self.expected = accepted, expected
        self.ratios = [[a / e for a, e in zip(*rows, strict=True)] for rows in zip(accepted, expected, strict=True)]


def _prob(score: float) -> float:
    """Of a token, by the difference of two paths' scores."""
    return math.exp(min(max(LEAST, score), 0.0))  # in this order NaN, of −inf behind −inf, is LEAST


class RowBudget:
    """Chooses how many rows of a step are forwarded, where the host may.

    Args:
        odds: of rows; learns from every step.

    Attributes:
        price: of 1 … R rows of every sequence, in tokens of one that decoding makes meanwhile; R is the most that a
            step can have. ``None``: unknown, all rows are forwarded.
    """

    def __init__(self, odds: RowOdds) -> None:
        self.odds = odds
        self.price: Sequence[float] | None = None
        self.forwarded: list[tuple[list[float], list[int]]] = []  # scores and parents of the last step, by sequence

    def __call__(self, rows: Rows, count: int) -> int:
        """Rows to forward, 1 … ``count``; the fewest of equals.

        Args:
            rows: best first, on the host.
            count: rows that hold a token, in the longest sequence.
        """
        # Lists cost less than arrays here.
        trees = [
            (scores[:count], parents[:count])
            for scores, parents in zip(rows.scores.tolist(), rows.parent_rows.tolist(), strict=True)
        ]
        if self.price is not None:
            most, tokens = -math.inf, 0.0
            odds = zip(*(self.odds.of(*tree) for tree in trees), strict=True)
            for place, (price, some) in enumerate(zip(self.price, odds, strict=False), 1):
                tokens += sum(some) / len(some)
                if tokens - price > most:
                    most, count = tokens - price, place
        self.forwarded = [(scores[:count], parents[:count]) for scores, parents in trees]
        return count

    def observe(self, accepted: Acceptance) -> None:
        """Learn which rows of the last step, if it asked, were accepted."""
        if self.forwarded:
            paths, counts = accepted.accepted_rows.tolist(), accepted.num_accepted.tolist()
            for tree, path, length in zip(self.forwarded, paths, counts, strict=True):
                if length:  # else the sequence was finished before
                    self.odds.observe(*tree, path[:length])
        self.forwarded = []
