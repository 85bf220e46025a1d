"""Disturbed steps: other programs slow a step down whatever it forwards, and its seconds are no cost of its rows.

Forwards of as many rows cost the same, so what they differ by is disturbance, whatever is believed of costs. Where a
machine is busy half of the time, some steps are quick and agree with what rows cost, relative to each other; where all
steps are disturbed, more or less, only means compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

QUICK_SHARE = 0.25  # of a period's steps, at least, that are held for quick ones
QUICK_LOG_SECONDS = 0.3  # beyond the slowest of them another step is as quick
AGREE_STD = 0.1  # log seconds: quick steps that differ by more were disturbed too
MAX_DEVIATION = 1.0  # log seconds that one step counts for
REMEMBERED_STEPS = 32

Observations = tuple[list[int], list[float], list[float]]
"""Rows, seconds, and standard deviations of log seconds."""


class Period:
    """Forwards of successive steps.

    Args:
        steps: rows of all sequences together, and seconds.
    """

    def __init__(self, steps: Sequence[tuple[int, float]]) -> None:
        self.rows, self.seconds = np.array(steps).T  # [n] each
        self.alike = list(dict.fromkeys(rows for rows, _ in steps))
        self.parts = [self.rows == rows for rows in self.alike]  # [n] each, by row count
        self.sizes = [int(part.sum()) for part in self.parts]

    def alone(self, value: Callable[[np.ndarray], Any], noise: float) -> Observations:
        """One value of forwards of as many rows, their median or mean say, for ``noise`` of each."""
        values = [float(value(self.seconds[part])) for part in self.parts]
        return self.alike, values, [noise / size**0.5 for size in self.sizes]

    def quick(self, beyond: np.ndarray) -> np.ndarray | None:
        """Find the forwards that were not disturbed, bool [n]; ``None``: perhaps none.

        Args:
            beyond: log seconds beyond those that a forward of as many rows is predicted to take, [n].
        """
        quick = beyond <= np.quantile(beyond, QUICK_SHARE) + QUICK_LOG_SECONDS
        return quick if beyond[quick].std() < AGREE_STD else None

    def fastest(self, quick: np.ndarray, noise: float, disturbed: float) -> Observations:
        """Geometric means of the quick forwards of as many rows; where none was quick, the fastest forward.

        Args:
            quick: which were, bool [n].
            noise, disturbed: of a quick forward, and of another.
        """
        seconds, noises = [], []
        for part in self.parts:
            some = self.seconds[part & quick]
            seconds.append(mean(some) if some.size else float(self.seconds[part].min()))
            noises.append(noise / some.size**0.5 if some.size else disturbed)
        return self.alike, seconds, noises


class Spread:
    """The differences between forwards of as many rows of late."""

    def __init__(self) -> None:
        self.deviations: list[float] = []

    def observe(self, period: Period) -> float:
        """The standard deviation of their log seconds, as the mean deviation has it, with those of a period."""
        deviations = list(self.deviations)
        for logs in (np.log(period.seconds[part]) for part in period.parts):
            if logs.size > 1:
                deviations += np.minimum(abs(logs - np.median(logs)), MAX_DEVIATION).tolist()
        deviations = self.deviations = deviations[-REMEMBERED_STEPS:]
        return float(np.mean(deviations)) * (np.pi / 2) ** 0.5 if deviations else 0.0


def mean(seconds: np.ndarray) -> float:
    """Geometric."""
    return float(np.exp(np.log(seconds).mean()))
