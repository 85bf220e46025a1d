"""How many of a step's rows are worth their time.

A step takes ``seconds(n)`` with n rows and brings ``tokens(n)``; the best n has the most tokens a second. What decoding
brings in the long run would be the price of time (the renewal-reward theorem's) if steps had nothing to do with one
another. But where a text is easy, the next step finds it easy too: what is left to it is cheap, so sure rows are worth
less than their tokens; and more where it is hard.
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
DEEPEST = 2  # best children are told apart by their parents' depth: the root, a row behind it, and all deeper ones
KINDS = 2 + DEEPEST  # of rows: those, and all other children
OTHER = KINDS - 1
BELIEF = 8.0  # rows that the sources' own probabilities count for in each cell
MEMORY = 0.99  # of what was counted in a cell, a row
PRIOR = [BELIEF * prob for prob in USUAL]  # rows accepted, before anything was seen
LEAST = -30.0  # of logarithms
LEFT = 1e-3  # probability for other tokens, at least: sources round
TEACHES = 0.03  # tokens of later steps that a forwarded row brings: the history learns what follows it


class RowOdds:
    """How often a row is accepted whose parent was and whose better siblings were not.

    By its probability among the tokens that are left then, and by its kind. A path's probability is a product, as if
    a token said nothing of the next one; but where the sources were right once, they are again, and their first guess
    deserves more than its probability, where the others do not. As each sibling has a share of what the better ones
    leave, all together are no likelier than their parent.
    """

    def __init__(self) -> None:
        self.accepted = [list(PRIOR) for _ in range(KINDS)]
        self.expected = [list(row) for row in self.accepted]
        self.ratios = [[1.0] * BINS for _ in range(KINDS)]

    def of(self, scores: Sequence[float], parents: Sequence[int]) -> list[float]:
        """Probabilities that rows are accepted.

        Args:
            scores: of rows, the root first: logarithms of their paths' probabilities.
            parents: of rows, by place, before their children, of which better ones come first; −1 of the root and of
                padding.
        """
        count, ratios = len(scores), self.ratios
        odds, depths = [1.0] * count, [0] * count
        left, free = [1.0] * count, [1.0] * count  # probabilities: of other children's tokens; of none accepted yet
        kinds = [0] * count  # of the next child
        for row in range(1, count):
            parent = parents[row]
            if parent < 0:
                odds[row] = 0.0
                continue
            prob, kind = _prob(scores[row] - scores[parent]), kinds[parent]
            share = min(prob / left[parent], 1.0)
            taken = min(share * ratios[kind][bisect(EDGES, share)], 1.0)
            odds[row] = free[row] = free[parent] * taken
            free[parent] *= 1.0 - taken
            left[parent] = max(left[parent] - prob, LEFT)
            kinds[parent] = OTHER
            kinds[row] = depths[row] = min(depths[parent] + 1, DEEPEST)
        return odds

    def observe(self, scores: Sequence[float], parents: Sequence[int], path: Sequence[int]) -> None:
        """Rows of a step, as above, of which those of ``path``, the root first, were accepted."""
        kinds = {row: min(depth, DEEPEST) for depth, row in enumerate(path)}  # of accepted rows' next children
        left = dict.fromkeys(path, 1.0)
        for row in range(1, len(scores)):
            parent = parents[row]
            if parent in kinds:
                prob, kind, right = _prob(scores[row] - scores[parent]), kinds[parent], row in left
                share = min(prob / left[parent], 1.0)
                cell = bisect(EDGES, share)
                accepted, expected = self.accepted[kind], self.expected[kind]
                expected[cell] = PRIOR[cell] + MEMORY * (expected[cell] - PRIOR[cell]) + share
                accepted[cell] = PRIOR[cell] + MEMORY * (accepted[cell] - PRIOR[cell]) + right
                self.ratios[kind][cell] = accepted[cell] / expected[cell]
                left[parent] = max(left[parent] - prob, LEFT)
                kinds[parent] = OTHER
                if right:
                    del kinds[parent]  # what siblings behind the right one are worth, nobody knows

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
            if [len(row) for row in table] != [BINS] * KINDS or len(counts) != BINS * KINDS:
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
        seconds: of a step with 1 … R rows of every sequence; R is the most that a step can have. ``None``: unknown, all
            rows are forwarded.
    """

    def __init__(self, odds: RowOdds) -> None:
        self.odds = odds
        self.seconds: Sequence[float] | None = None
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
        if self.seconds is not None:
            most, tokens = 0.0, 0.0  # tokens a second; tokens
            odds = zip(*(self.odds.of(*tree) for tree in trees), strict=True)
            for place, (seconds, some) in enumerate(zip(self.seconds, odds, strict=False), 1):
                tokens += sum(some) / len(some) + TEACHES
                if tokens > most * seconds:
                    most, count = tokens / seconds, place
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
