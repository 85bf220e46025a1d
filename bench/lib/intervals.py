"""Paired bootstrap intervals for ratios of totals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True)
class Ratio:
    """A ratio and its 95% interval; ``None`` where there were too few prompts for one."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        return f"{self.value:.2f}" + ("" if self.low is None else f" ({self.low:.2f}–{self.high:.2f})")


Totals = Sequence[tuple[float, float]]
"""One (amount, cost) a prompt: tokens and seconds, or tokens and steps."""


def paired_ratio(ours: Totals, theirs: Totals, *, fewest: int = 1) -> Ratio:
    """Rate of ``ours`` over rate of ``theirs``, a rate being total amount over total cost.

    Prompts are drawn with replacement, the same ones on both sides. Fewer than ``fewest`` give no interval: what is
    drawn of two or three varies too little.

    Raises:
        ValueError: the two are not paired, or there is nothing.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"expected as many prompts on both sides and at least one, got {len(ours)} and {len(theirs)}")
    a, b = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)

    def rate(totals: np.ndarray) -> np.ndarray:
        return totals[..., 0] / totals[..., 1]

    value = float(rate(a.sum(0)) / rate(b.sum(0)))
    if len(ours) < fewest:
        return Ratio(value, None, None)
    drawn = np.random.default_rng(0).integers(len(a), size=(RESAMPLES, len(a)))
    ratios = rate(a[drawn].sum(1)) / rate(b[drawn].sum(1))
    low, high = np.quantile(ratios, (0.025, 0.975))
    return Ratio(value, float(low), float(high))
