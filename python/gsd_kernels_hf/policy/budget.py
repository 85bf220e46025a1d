"""How many of a step's rows are worth their time.

A step takes ``seconds(n)`` with n rows and brings ``tokens(n)``. Of a decoder that makes ``rate`` tokens a second in
the long run, the best n is where ``tokens(n) − rate · seconds(n)`` is largest: a row must bring its tokens faster than
all else does (the renewal-reward theorem's price of time). Text that the sources are sure of gets many rows, other
text few, step by step, which no fixed shape can do. Only counts that shapes of the ladder have are compared: products
multiply several rows at a time, so the seconds rise in steps, and those are the counts at which they are known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor


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

    Attributes:
        price: ``None``: unknown, all rows are forwarded.
        trust: tokens that rows bring over what their scores promise.
        promised: tokens beyond the first that the rows of the last step promised, a sequence; ``None`` if it had none.
    """

    def __init__(self) -> None:
        self.price: Price | None = None
        self.trust = 1.0
        self.promised: float | None = None

    def __call__(self, scores: Tensor, count: int) -> int:
        """Rows to forward, 1 … ``count``.

        Args:
            scores: float32 [B, R] on the host, logarithms of path probabilities, best first, −inf for padding.
            count: rows that hold a token, in the longest sequence.
        """
        sums, total = [], 0.0
        for row in zip(*scores.tolist(), strict=True):  # the root first, which is there; lists cost less than arrays
            total += sum(map(math.exp, row)) / len(row)
            sums.append(total)
        sums = sums[:count]
        if self.price is not None:
            count = self.price.best([1.0 + self.trust * (tokens - 1.0) for tokens in sums])
        self.promised = sums[count - 1] - 1.0
        return count
