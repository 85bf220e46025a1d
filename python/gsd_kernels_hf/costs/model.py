"""Seconds of a step's parts: a prior known without measuring, corrected by every step that is decoded.

The prior is arithmetic: bytes that a forward reads over the memory's bandwidth, multiplications over the processor's
speed, each hidden behind the other as the legs of a triangle are by its hypotenuse, and a little for every layer. What
steps really take corrects its logarithm by a Kalman filter: a Gaussian over a few row counts, smooth between them, with
one slope over the cached tokens; likewise for what a step needs besides the target, shape by shape. A machine is slow
now and then and never fast by accident, so a step that takes longer than predicted is weighted less the further it is
out, and one that takes less is weighted in full.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gsd_kernels import GraphConfig
from gsd_kernels.config import PLAIN

from .. import numbers
from .disturbance import Observations, Period, Spread, mean
from .prior import CostPrior

# Row counts, of all sequences together, at which seconds are known: 1, 2, 3 … 16, 24, 32, 48 … 16384. Kernels take
# several rows at a time, so 11 may cost what 8 do, and 12 more.
ROW_COUNTS = np.union1d(np.arange(1.0, 17.0), np.append(2.0 ** np.arange(15), 3.0 * 2.0 ** np.arange(13)))
LOG2_ROWS = np.log2(ROW_COUNTS)
MAX_MEAN = 20.0  # of log seconds: further from its prior no machine is

# Every _STD is a standard deviation of natural log seconds. Priors of the target's forward: shared by all row counts (a
# factor of three); of the deviation from the predicted curve over them, whose correlation falls to 1/e over so many
# doublings; of one row count alone; of the slope per doubling of 1 + cached tokens / PREFIX_UNIT_TOKENS.
LEVEL_STD, CURVE_STD, CURVE_OCTAVES, ROW_COUNT_STD = 1.2, 0.45, 4.0, 0.04
PREFIX_SLOPE_STD, PREFIX_UNIT_TOKENS = 0.15, 1024.0
# Priors of all else in a step: shared by all shapes; by shapes with a draft model's levels, by shapes without, by plain
# steps; of one shape alone; of the slope per doubling of the batch.
STEP_STD, KIND_STD, SHAPE_STD, BATCH_SLOPE_STD = 0.6, 1.0, 0.4, 0.2
OBSERVATION_STD = 0.1  # noise of one step
MIN_OTHER_STD = 0.2  # of all else in one step, at least
SLOW_VARIANCE_SHARE = 0.5  # of its squared innovation a slower step adds to its noise: a hiccup hardly counts
CALM_STD = 0.2  # forwards of as many rows that differ by more say that the machine is disturbed
# Process noise per step: shared by all row counts and by all shapes; of one row count, of one shape; of the forward
# where row counts vary, correlated over one octave: memory and arithmetic become slow and fast each on its own.
DRIFT_STD, ROW_COUNT_DRIFT_STD, VARYING_ROWS_DRIFT_STD = 0.01, 0.004, 0.02
RESTART_STD = 0.2  # added when costs are loaded: the machine may be another than it was for that process
FASTER_STDS = 3.0  # innovations below minus so many standard deviations: the whole machine became faster
SLOWER_STDS, SLOWER_STEPS = 2.0, 6  # so many steps in a row above so many: it became slower
MIN_SECONDS, MAX_SECONDS = 1e-7, 1e4  # observed seconds are clamped to these


class LogTimeFilter:
    """Kalman filter of log(observed / prior seconds): a Gaussian over a few values, updated by one step at a time.

    Nothing is changed in place: a shallow copy keeps what was known.

    Args:
        covariance: prior of the values, [n − 1, n − 1]; one more, a slope, is independent of them.
        slope_std: prior of the slope.
        process_noise: covariance that every step adds, [n − 1, n − 1].
    """

    def __init__(self, covariance: np.ndarray, slope_std: float, process_noise: np.ndarray) -> None:
        self.mean = np.zeros(len(covariance) + 1)
        self.slow: list[float] = []  # innovations of the last steps, while all of them were slow
        self.common = np.append(np.ones(len(covariance)), 0.0)  # [n]; a factor of the whole machine
        self.covariance, self.process_noise = np.pad(covariance, (0, 1)), np.pad(process_noise, (0, 1))
        self.covariance[-1, -1] = slope_std**2
        self.prior_variance = self.covariance.diagonal()

    def observe(
        self, weights: np.ndarray, residual: float, noise: float, slow_share: float = SLOW_VARIANCE_SHARE
    ) -> None:
        """Update by one step.

        Args:
            weights: which values its time consists of, [n].
            residual: log(observed / prior seconds).
            noise: standard deviation of the observation, log seconds.
            slow_share: see :data:`SLOW_VARIANCE_SHARE`.
        """
        covariance = self.covariance + self.process_noise
        # No variance exceeds its prior: by the noise of every step values that are never seen would drift to where
        # anything is believed. Rows and columns are scaled alike, which keeps the correlations.
        excess = np.sqrt(np.maximum(covariance.diagonal() / self.prior_variance, 1.0))
        covariance /= excess[:, None] * excess
        cross = covariance @ weights
        variance = max(float(weights @ cross), 0.0)  # digits that a file left out may make it a little less
        std = math.sqrt(variance + noise * noise)
        # Three things that a plain filter lacks, since a machine is slow for moments and never quick by chance: several
        # slow steps in a row are believed at once, so is a step that is much too quick, and a single slow one hardly.
        innovation = residual - float(weights @ self.mean)
        innovation -= self._slowdown(innovation, std)
        if innovation < -FASTER_STDS * std:
            # The machine was busy and is no longer: all else was seen too slow as well. A variance along what is common
            # to all values, as large as the surprise, lets this step correct them together.
            covariance = covariance + innovation**2 * np.outer(self.common, self.common)
            cross = covariance @ weights
            variance = max(float(weights @ cross), 0.0)
        # With its own square in its noise a slow step pulls by x / (a + share · x²): less, the slower it was.
        variance += noise * noise + slow_share * max(innovation, 0.0) ** 2
        self.mean = self.mean + cross * (innovation / variance)
        part = cross / math.sqrt(variance)
        self.covariance = covariance - part[:, None] * part

    def _slowdown(self, innovation: float, std: float) -> float:
        """Log seconds by which the whole machine became slower: the least of several slow steps in a row, else 0."""
        slow = self.slow = [*self.slow, innovation] if innovation > SLOWER_STDS * std else []
        if len(slow) < SLOWER_STEPS:
            return 0.0
        # So much all of them have in common. The mean is moved as a whole, ahead of the update, which would take the
        # slowdown for one of this step's row count.
        least, self.slow = min(slow), []
        self.mean = self.mean + least * self.common
        return least

    def std(self, weights: np.ndarray) -> np.ndarray:
        """Standard deviations of linear combinations, log seconds: weights [S, n] → [S]."""
        return np.sqrt(np.maximum(((weights @ self.covariance) * weights).sum(1), 0.0))

    def as_dict(self) -> dict[str, Any]:
        """Mean and covariance, for the disk."""
        return {"mean": _rounded(self.mean), "covariance": [_rounded(row) for row in self.covariance]}

    def loaded(self, data: Mapping[str, Any]) -> LogTimeFilter:
        """Another with what :meth:`as_dict` gave; the machine may be faster or slower today, for all values alike.

        Raises:
            ValueError, KeyError, TypeError: it is not that.
        """
        other = copy.copy(self)
        other.mean = numbers.array("mean", data["mean"], self.mean.shape, -MAX_MEAN, MAX_MEAN)
        other.covariance = numbers.covariance("covariance", data["covariance"], 2 * self.prior_variance + 1)
        other.covariance[:-1, :-1] += RESTART_STD**2
        return other


class CostModel:
    """Seconds of a step's parts by rows, cached tokens and shape.

    Threads share it without a lock, as they do an
    :class:`~gsd_kernels_hf.policy.acceptance.AcceptanceModel`.

    Args:
        prior: of the pair.
        shapes: by name, those that steps can have.
        rows_vary: whether the number of rows varies between steps of one shape. As many row counts are then seen as can
            be, so memory and arithmetic are taken to become slow and fast each on its own.
    """

    def __init__(self, prior: CostPrior, shapes: Mapping[str, GraphConfig], *, rows_vary: bool = False) -> None:
        self.prior = prior
        self.names = (PLAIN, *shapes)  # plain: no speculation
        self.index = {name: i for i, name in enumerate(self.names)}
        self.prior_other = np.array([prior.other_seconds(None), *(prior.other_seconds(s) for s in shapes.values())])
        apart, each = np.abs(LOG2_ROWS[:, None] - LOG2_ROWS), np.eye(len(ROW_COUNTS))
        covariance = LEVEL_STD**2 + CURVE_STD**2 * np.exp(-(apart / CURVE_OCTAVES)) + ROW_COUNT_STD**2 * each
        drift = VARYING_ROWS_DRIFT_STD**2 * np.exp(-apart) if rows_vary else DRIFT_STD**2
        self.target = LogTimeFilter(covariance, PREFIX_SLOPE_STD, drift + ROW_COUNT_DRIFT_STD**2 * each)
        kind, each = np.array([0, *(1 if shape.depth else 2 for shape in shapes.values())]), np.eye(len(self.names))
        covariance = STEP_STD**2 + KIND_STD**2 * (kind[:, None] == kind) + SHAPE_STD**2 * each
        self.other = LogTimeFilter(covariance, BATCH_SLOPE_STD, DRIFT_STD**2 + ROW_COUNT_DRIFT_STD**2 * each)
        self.spread = Spread()
        self.timed: dict[str, int] = {}  # number of timed steps, by name of the shape

    @property
    def steps(self) -> int:
        """Number of timed steps."""
        return sum(self.timed.copy().values())

    def target_weights(self, rows: np.ndarray, cached: float) -> np.ndarray:
        """The weights of the values in a forward's log seconds: rows [S] of all sequences → [S, row counts + 1]."""
        octave = np.log2(np.maximum(rows, 1.0))
        weights = [np.interp(octave, LOG2_ROWS, one) for one in np.eye(len(ROW_COUNTS))]
        return np.stack([*weights, np.full(len(rows), _doublings(cached))], 1)

    def other_weights(self, names: Sequence[int] | np.ndarray, batch: int) -> np.ndarray:
        """The weights of the values in the log seconds of all else: indices [S] of names → [S, names + 1]."""
        weights = np.eye(len(self.names) + 1)[names]
        weights[:, -1] = np.log2(batch)
        return weights

    def target_seconds(self, rows: np.ndarray, cached: float) -> np.ndarray:
        """Seconds of target forwards, rows [S] of all sequences together; never less for more rows."""
        values = self.target.mean
        correction = np.exp(values[:-1] + values[-1] * _doublings(cached))
        seconds = self.prior.target_seconds(ROW_COUNTS, cached) * correction
        # Errors can make more rows look cheaper; what is known best moves least where that is put right.
        known = increasing(seconds, 1.0 / np.maximum(self.target.covariance.diagonal()[:-1], 1e-6))
        return np.exp(np.interp(np.log2(np.maximum(rows, 1.0)), LOG2_ROWS, np.log(known)))

    def other_seconds(self, batch: int) -> np.ndarray:
        """All else in a step, by name: of plain decoding and of every shape, [1 + shapes]."""
        return self.prior_other * np.exp(self.other.mean[:-1] + self.other.mean[-1] * np.log2(batch))

    def observe(
        self,
        name: str,
        rows: int,
        cached: float,
        batch: int,
        target: float,
        other: float,
        *,
        noise: float = OBSERVATION_STD,
    ) -> None:
        """Learn from one step.

        Args:
            name: of its shape.
            rows, cached: rows, and tokens in the target's cache, of all sequences together.
            batch: sequences.
            target, other: seconds of the target's forward, and of all else; 0: unknown.
            noise: standard deviation of both, log seconds.
        """
        if target > 0:
            self._correct(([rows], [target], [noise]), cached)
            self.timed[name] = self.timed.get(name, 0) + 1
        if other > 0:
            place = self.index[name]
            weights = self.other_weights([place], batch)[0]
            self.other.observe(weights, math.log(_clamped(other) / self.prior_other[place]), max(noise, MIN_OTHER_STD))

    def observe_period(self, name: str, steps: Sequence[tuple[int, float]], cached: float, noise: float) -> None:
        """Learn from the forwards of successive steps of one shape.

        Forwards of as many rows are one observation, their median: an observation of each costs a decoder time. Where
        forwards of as many rows differ as they do not on an undisturbed machine, all are learned anew: from the quick
        ones, if there are some that agree.

        Args:
            name: of the steps' shape.
            steps: rows of all sequences together, and seconds of the target's forward.
            cached: tokens in the target's cache, of all sequences together.
            noise: standard deviation of one forward's log seconds, on an undisturbed machine.
        """
        if not steps:
            return
        period, before = Period(steps), copy.copy(self.target)
        self._correct(period.alone(np.median, noise), cached)
        self.timed[name] = self.timed.get(name, 0) + len(steps)
        std = self.spread.observe(period)
        if std <= max(CALM_STD, noise):
            return
        quick = period.quick(np.log(period.seconds / self.target_seconds(period.rows, cached)))
        self.target = before  # as if the medians had not been learned
        # The whole machine may be slower or faster than it was: steps say how row counts compare.
        before.covariance = before.covariance + std**2 * np.outer(before.common, before.common)
        if quick is None:
            self._correct(period.alone(mean, std), cached, slow_share=0.0)
        else:
            self._correct(period.fastest(quick, noise, std), cached)

    def _correct(self, seen: Observations, cached: float, slow_share: float = SLOW_VARIANCE_SHARE) -> None:
        """Correct the target's seconds by those of several forwards behind about as many tokens."""
        weights = self.target_weights(np.array(seen[0], dtype=float), cached)
        # Between row counts the prior is interpolated as it is when asked for.
        expected = weights[:, :-1] @ np.log(self.prior.target_seconds(ROW_COUNTS, cached))
        for part, prior, seconds, noise in zip(weights, expected.tolist(), *seen[1:], strict=True):
            self.target.observe(part, math.log(_clamped(seconds)) - prior, noise, slow_share)

    def as_dict(self) -> dict[str, Any]:
        """All that was learned, for the disk."""
        filters, timed = {"target": self.target.as_dict(), "other": self.other.as_dict()}, self.timed.copy()
        return {"names": list(self.names), **filters, "steps": sum(timed.values()), "timed": timed}

    def load(self, data: Mapping[str, Any]) -> None:
        """Load what :meth:`as_dict` gave, of the same shapes.

        Raises:
            ValueError, KeyError, TypeError: it is not that; nothing was taken over.
        """
        if data["names"] != list(self.names):
            raise ValueError("names: of other shapes")
        steps, timed = numbers.count("steps", data["steps"]), numbers.table("timed", data["timed"], int)
        if not timed.keys() <= self.index.keys() or min(timed.values(), default=0) < 0 or sum(timed.values()) != steps:
            raise ValueError("timed: of other shapes, or not as many as steps")
        target, other = self.target.loaded(data["target"]), self.other.loaded(data["other"])
        self.target, self.other, self.timed = target, other, timed


def increasing(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The closest never falling sequence: isotonic regression by pooling adjacent violators, weights [n]."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        count = 1
        while blocks and blocks[-1][0] > value:
            v, w, c = blocks.pop()
            value, weight, count = (v * w + value * weight) / (w + weight), w + weight, c + count
        blocks.append((value, weight, count))
    return np.concatenate([np.full(count, value) for value, _, count in blocks])


def _doublings(cached: float) -> float:
    return math.log2(1.0 + cached / PREFIX_UNIT_TOKENS)


def _clamped(seconds: float) -> float:
    return min(max(seconds, MIN_SECONDS), MAX_SECONDS)


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.7g}") for value in values]
