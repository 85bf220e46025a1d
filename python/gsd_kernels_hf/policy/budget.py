"""How many of a step's rows are worth their time.

A step takes ``seconds(n)`` with n rows and brings ``tokens(n)``. Of a decoder that makes ``rate`` tokens a second in
the long run, the best n is where ``tokens(n) − rate · seconds(n)`` is largest: a row must bring its tokens faster than
all else does (the renewal-reward theorem's price of time). Text that the sources are sure of gets many rows, other
text few, step by step, which no fixed shape can do. Only the cost model's knots are compared: products multiply several
rows at a time, so the seconds rise in steps, and those are the counts at which they are known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from gsd_kernels import Acceptance

EXPONENT = 0.6  # of a path's probability, until more is known
BINS = 7  # of path probabilities: above 1/2, above 1/4, …, and all below 1/64
BELIEF = 4.0  # accepted rows that this counts for in each of them
MEMORY = 0.99  # of what was counted, a step
LEAST = -30.0  # of logarithms


class PathOdds:
    """How often rows are accepted, by their path probabilities.

    These are products, as if a token said nothing of the next one; but where the sources were right once, they are
    again: of paths with a probability of 0.03 one in nine was accepted, and of those with 0.2 nearly half.
    """

    def __init__(self) -> None:
        self.accepted, self.expected = [BELIEF] * BINS, [BELIEF] * BINS
        self.ratios = [1.0] * BINS

    def of(self, score: float) -> float:
        """Probability that a row is accepted, by the logarithm of its path's."""
        score = max(score, LEAST)
        return min(math.exp(EXPONENT * score) * self.ratios[_bin(score)], 1.0)

    def of_each(self, probs: np.ndarray) -> np.ndarray:
        """:meth:`of` many path probabilities, of any shape; 0 of 0."""
        octaves = -np.log2(np.maximum(probs, math.exp(LEAST)))
        ratios = np.array(self.ratios)[np.minimum(octaves.astype(int), BINS - 1)]
        return np.where(probs > 0, np.minimum(probs**EXPONENT * ratios, 1.0), 0.0)

    def observe(self, scores: Sequence[float], accepted: Sequence[int]) -> None:
        """Rows of one sequence's step but its root: logarithms, and which of them, by place, were accepted."""
        for counts in (self.accepted, self.expected):
            counts[:] = [BELIEF + MEMORY * (count - BELIEF) for count in counts]
        for place, score in enumerate(scores):
            if score > LEAST:
                self.expected[_bin(score)] += math.exp(EXPONENT * score)
                self.accepted[_bin(score)] += place in accepted
        self._count()

    def _count(self) -> None:
        self.ratios = [hits / of for hits, of in zip(self.accepted, self.expected, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """All of it, for the disk."""
        return {"accepted": list(self.accepted), "expected": list(self.expected)}

    def load(self, data: Mapping[str, Any]) -> None:
        """What :meth:`as_dict` gave.

        Raises:
            ValueError, KeyError, TypeError: it is not that; nothing was taken over.
        """
        accepted, expected = ([float(n) for n in data[part]] for part in ("accepted", "expected"))
        if len(accepted) != BINS or len(expected) != BINS or not all(0.0 < n < 1e9 for n in accepted + expected):
            raise ValueError("path odds: counts of another number, or none")
        self.accepted, self.expected = accepted, expected
        self._count()


def _bin(score: float) -> int:
    """Of the logarithm of a path probability."""
    return min(int(-score / math.log(2.0)), BINS - 1)


class Price:
    """What rows cost, in tokens of one sequence that decoding makes meanwhile.

    Args:
        of_rows: of 1 … R rows of every sequence, float64 [R].
        compared: counts of rows that may be chosen, ascending, at most R.
    """

    def __init__(self, of_rows: np.ndarray, compared: Sequence[int]) -> None:
        self.of_rows, self.compared = of_rows, tuple(compared)
        self.listed = of_rows.tolist()

    def best(self, tokens: Sequence[float]) -> int:
        """The rows, 1 … len(tokens), that bring most beyond their price; the fewest of equals.

        Args:
            tokens: that the first 1, 2, … rows bring. All of them are compared in any case.
        """
        count = len(tokens)
        some = [n for n in self.compared if n < count]
        return max([*some, count], key=lambda n: tokens[n - 1] - self.listed[n - 1])

    def best_of_each(self, tokens: np.ndarray, count: np.ndarray) -> np.ndarray:
        """:meth:`best` of many steps: tokens [..., R'], the first ``count`` [...] of each are there; int [...]."""
        size = tokens.shape[-1]
        place = np.arange(1, size + 1)
        compared = np.isin(place, self.compared) & (place < count[..., None])
        net = np.where(compared | (place == count[..., None]), tokens - self.of_rows[:size], -np.inf)
        return 1 + net.argmax(-1)


class RowBudget:
    """Chooses how many rows of a step are forwarded; where shapes are static, nobody asks it.

    Args:
        odds: of rows, by their path probabilities; learns from every step.

    Attributes:
        price: ``None``: unknown, all rows are forwarded.
        asked: whether steps ask.
    """

    def __init__(self, odds: PathOdds) -> None:
        self.odds = odds
        self.price: Price | None = None
        self.asked = False
        self.forwarded: list[list[float]] = []  # scores of the rows of the last step, by sequence

    def __call__(self, scores: Tensor, count: int) -> int:
        """Rows to forward, 1 … ``count``.

        Args:
            scores: float32 [B, R] on the host, logarithms of path probabilities, best first, −inf for padding.
            count: rows that hold a token, in the longest sequence.
        """
        self.asked = True
        lists = [row[:count] for row in scores.tolist()]  # lists cost less than arrays
        if self.price is not None:
            sums, total = [], 0.0
            for row in zip(*lists, strict=True):  # the root first, which is there
                total += sum(map(self.odds.of, row)) / len(row)
                sums.append(total)
            count = self.price.best(sums)
        self.forwarded = [row[1:count] for row in lists]
        return count

    def observe(self, accepted: Acceptance) -> None:
        """Learn which rows of the last step, if it asked, were accepted."""
        if self.forwarded:
            paths, counts = accepted.accepted_rows.tolist(), accepted.num_accepted.tolist()
            for scores, path, length in zip(self.forwarded, paths, counts, strict=True):
                if length:  # else the sequence was finished before
                    self.odds.observe(scores, [row - 1 for row in path[1:length]])
        self.forwarded = []
