"""Seconds of a step's parts: a prior known without measuring, corrected by every step that is decoded.

The prior is arithmetic: bytes that a forward reads over the memory's bandwidth, multiplications over the processor's
speed, each hidden behind the other as the legs of a triangle are by its hypotenuse, and a little for every layer. What
steps really take corrects its logarithm by a Kalman filter: a Gaussian over a few row counts, smooth between them, with
one slope over the cached tokens; likewise for what a step needs besides the target, shape by shape. A machine is slow
now and then and never fast by accident, so a step that takes longer than predicted is weighted less the further it is
out, and one that takes less is weighted in full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gsd_kernels import GraphConfig

from .. import numbers
from .disturbance import Period, Spread
from .prior import CostPrior

# Row counts, of all sequences together, at which seconds are known: 1, 2, 3 … 16, 24, 32, 48 … 16384. Kernels take
# several rows at a time, so 11 may cost what 8 do, and 12 more.
ROW_COUNTS = np.union1d(np.arange(1.0, 17.0), np.append(2.0 ** np.arange(15), 3.0 * 2.0 ** np.arange(13)))
LOG2_ROWS = np.log2(ROW_COUNTS)
MAX_MEAN = 20.0  # of log seconds: further from its prior no machine is
PLAIN = "plain"  # among the names of shapes: no speculation


@dataclass(frozen=True)
class CostSettings:
    """Prior and noise of a :class:`CostModel`. Every ``_std`` is a standard deviation of natural log seconds.

    Attributes:
        level_std: prior of the target's forward, shared by all row counts: 1.2 is a factor of three.
        curve_std: prior of its deviation from the predicted curve over row counts.
        curve_octaves: doublings of the row count over which that deviation's correlation falls to 1/e.
        row_count_std: prior of one row count alone.
        prefix_slope_std: prior of the slope per doubling of ``1 + cached tokens / prefix_unit_tokens``.
        prefix_unit_tokens: see there.
        step_std: prior of all else in a step, shared by all shapes.
        kind_std: prior of all else, shared by shapes with a draft model's levels, by shapes without, by plain steps.
        shape_std: prior of all else, of one shape alone.
        batch_slope_std: prior of the slope per doubling of the batch, of all else.
        observation_std: noise of one step.
        first_observation_std: noise of a shape's first step in a process: storage is made, code is loaded.
        min_other_std: noise of all else in one step, at least.
        slow_variance_share: share of the squared innovation that a slower step adds to its noise variance, so that a
            hiccup hardly counts.
        calm_std: forwards of as many rows that differ by more say that the machine is disturbed.
        drift_std: process noise per step, shared by all row counts and by all shapes.
        row_count_drift_std: process noise per step of one row count, of one shape.
        varying_rows_drift_std: process noise per step of the forward where row counts vary, correlated over one octave:
            memory and arithmetic become slow and fast each on its own.
        restart_std: added when costs are loaded from disk: the machine may be another than it was for that process.
        faster_stds: innovations below minus this many standard deviations say that the whole machine became faster.
        slower_stds, slower_steps: this many steps in a row above this many standard deviations say that it became
            slower.
        min_seconds, max_seconds: observed seconds are clamped to these.
    """

    level_std: float = 1.2
    curve_std: float = 0.45
    curve_octaves: float = 4.0
    row_count_std: float = 0.04
    prefix_slope_std: float = 0.15
    prefix_unit_tokens: float = 1024.0
    step_std: float = 0.6
    kind_std: float = 1.0
    shape_std: float = 0.4
    batch_slope_std: float = 0.2
    observation_std: float = 0.1
    first_observation_std: float = 0.7
    min_other_std: float = 0.2
    slow_variance_share: float = 0.5
    calm_std: float = 0.2
    drift_std: float = 0.01
    row_count_drift_std: float = 0.004
    varying_rows_drift_std: float = 0.02
    restart_std: float = 0.2
    faster_stds: float = 3.0
    slower_stds: float = 2.0
    slower_steps: int = 6
    min_seconds: float = 1e-7
    max_seconds: float = 1e4


class LogTimeFilter:
    """Kalman filter of log(observed / prior seconds): a Gaussian over a few values, updated by one step at a time.

    Args:
        covariance: prior of the values, [n, n]; the last value is a slope.
        process_noise: covariance that every step adds, [n, n].
        settings: of noise.
    """

    def __init__(self, covariance: np.ndarray, process_noise: np.ndarray, settings: CostSettings) -> None:
        self.mean = np.zeros(len(covariance))
        self.settings = settings
        self.slow: list[float] = []  # innovations of the last steps, while all of them were slow
        self.common = np.append(np.ones(len(covariance) - 1), 0.0)  # [n]; a factor of the whole machine
        self.covariance, self.process_noise = covariance, process_noise
        self.prior_variance = covariance.diagonal()

    def observe(self, weights: np.ndarray, residual: float, noise: float, slow_share: float | None = None) -> None:
        """Update by one step.

        Args:
            weights: which values its time consists of, [n].
            residual: log(observed / prior seconds).
            noise: standard deviation of the observation, log seconds.
            slow_share: in place of ``settings.slow_variance_share``.
        """
        settings = self.settings
        covariance = self.covariance + self.process_noise
        # No variance exceeds its prior: by the noise of every step values that are never seen would drift to where
        # anything is believed. Rows and columns are scaled alike, which keeps the correlations.
        diagonal = covariance.diagonal()
        if (diagonal > self.prior_variance).any():
            excess = np.sqrt(np.maximum(diagonal / self.prior_variance, 1.0))
            covariance = covariance / (excess[:, None] * excess)
        cross = covariance @ weights
        variance = max(float(weights @ cross), 0.0)  # digits that a file left out may make it a little less
        # Three things that a plain filter lacks, since a machine is slow for moments and never quick by chance: several
        # slow steps in a row are believed at once, so is a step that is much too quick, and a single slow one hardly.
        innovation = residual - float(weights @ self.mean)
        innovation -= self._slowdown(innovation, math.sqrt(variance + noise * noise))
        if innovation < -settings.faster_stds * math.sqrt(variance + noise * noise):
            # The machine was busy and is no longer: all else was seen too slow as well. A variance along what is common
            # to all values, as large as the surprise, lets this step correct them together.
            covariance = covariance + innovation**2 * np.outer(self.common, self.common)
            cross = covariance @ weights
            variance = max(float(weights @ cross), 0.0)
        # With its own square in its noise a slow step pulls by x / (a + share · x²): less, the slower it was.
        share = settings.slow_variance_share if slow_share is None else slow_share
        variance += noise * noise + share * max(innovation, 0.0) ** 2
        self.mean = self.mean + cross * (innovation / variance)
        part = cross / math.sqrt(variance)
        self.covariance = covariance - part[:, None] * part

    @property
    def state(self) -> tuple[np.ndarray, np.ndarray, list[float]]:
        """All that an observation changes."""
        return self.mean, self.covariance, self.slow

    @state.setter
    def state(self, state: tuple[np.ndarray, np.ndarray, list[float]]) -> None:
        self.mean, self.covariance, self.slow = state

    def _slowdown(self, innovation: float, std: float) -> float:
        """Log seconds by which the whole machine became slower: the least of several slow steps in a row, else 0."""
        self.slow = [*self.slow, innovation] if innovation > self.settings.slower_stds * std else []
        if len(self.slow) < self.settings.slower_steps:
            return 0.0
        # So much all of them have in common. The mean is moved as a whole, ahead of the update, which would take the
        # slowdown for one of this step's row count.
        least, self.slow = min(self.slow), []
        self.mean = self.mean + least * self.common
        return least

    def std(self, weights: np.ndarray) -> np.ndarray:
        """Standard deviations of linear combinations, log seconds: weights [S, n] → [S]."""
        return np.sqrt(np.maximum(((weights @ self.covariance) * weights).sum(1), 0.0))

    def as_dict(self) -> dict[str, Any]:
        """Mean and covariance, for the disk."""
        return {"mean": _rounded(self.mean), "covariance": [_rounded(row) for row in self.covariance]}

    def load(self, data: Mapping[str, Any]) -> None:
        """Load what :meth:`as_dict` gave.

        Raises:
            ValueError, KeyError, TypeError: it is not that; nothing was taken over.
        """
        mean = numbers.array("mean", data["mean"], self.mean.shape, -MAX_MEAN, MAX_MEAN)
        covariance = numbers.covariance("covariance", data["covariance"], 2 * self.prior_variance + 1)
        self.mean, self.covariance = mean, covariance


class CostModel:
    """Seconds of a step's parts by rows, cached tokens and shape.

    Args:
        prior: of the pair.
        shapes: by name, those that steps can have.
        rows_vary: whether the number of rows varies between steps of one shape. As many row counts are then seen as can
            be, so memory and arithmetic are taken to become slow and fast each on its own.
        settings: prior spreads and noises.
    """

    def __init__(
        self,
        prior: CostPrior,
        shapes: Mapping[str, GraphConfig],
        *,
        rows_vary: bool = False,
        settings: CostSettings | None = None,
    ) -> None:
        self.prior, self.settings = prior, settings or CostSettings()
        self.names = (PLAIN, *shapes)
        self.index = {name: i for i, name in enumerate(self.names)}
        self.prior_other = np.array([prior.other_seconds(None), *(prior.other_seconds(s) for s in shapes.values())])
        s, apart, each = self.settings, np.abs(LOG2_ROWS[:, None] - LOG2_ROWS), np.eye(len(ROW_COUNTS))
        covariance = s.level_std**2 + s.curve_std**2 * np.exp(-(apart / s.curve_octaves)) + s.row_count_std**2 * each
        common = s.varying_rows_drift_std**2 * np.exp(-apart) if rows_vary else s.drift_std**2
        drift = common + s.row_count_drift_std**2 * each
        self.target = LogTimeFilter(_with_slope(covariance, s.prefix_slope_std), _with_slope(drift, 0.0), s)
        kind, each = np.array([0, *(1 if shape.depth else 2 for shape in shapes.values())]), np.eye(len(self.names))
        covariance = s.step_std**2 + s.kind_std**2 * (kind[:, None] == kind) + s.shape_std**2 * each
        drift = s.drift_std**2 + s.row_count_drift_std**2 * each
        self.other = LogTimeFilter(_with_slope(covariance, s.batch_slope_std), _with_slope(drift, 0.0), s)
        self.latest: tuple[Any, ...] = None, None, -1.0, None  # mean, covariance, cached tokens, and what they give
        self.spread = Spread()
        self.steps = 0  # number of timed steps
        self.timed: dict[str, int] = {}  # of them, by name of the shape

    def target_weights(self, rows: np.ndarray, cached: float) -> np.ndarray:
        """The weights of the values in a forward's log seconds: rows [S] of all sequences → [S, row counts + 1]."""
        octave = np.minimum(np.log2(np.maximum(rows, 1.0)), LOG2_ROWS[-1])
        below = np.minimum(np.searchsorted(LOG2_ROWS, octave, side="right") - 1, len(ROW_COUNTS) - 2)
        share = (octave - LOG2_ROWS[below]) / (LOG2_ROWS[below + 1] - LOG2_ROWS[below])
        weights = np.zeros((len(rows), len(ROW_COUNTS) + 1))
        place = np.arange(len(rows))
        weights[place, below] = 1.0 - share
        weights[place, below + 1] = share
        weights[:, -1] = self._doublings(cached)
        return weights

    def other_weights(self, names: Sequence[int] | np.ndarray, batch: int) -> np.ndarray:
        """The weights of the values in the log seconds of all else: indices [S] of names → [S, names + 1]."""
        weights = np.zeros((len(names), len(self.names) + 1))
        weights[np.arange(len(names)), names] = 1.0
        weights[:, -1] = np.log2(batch)
        return weights

    def target_seconds(self, rows: np.ndarray, cached: float) -> np.ndarray:
        """Seconds of target forwards, rows [S] of all sequences together; never less for more rows."""
        return np.exp(np.interp(np.log2(np.maximum(rows, 1.0)), LOG2_ROWS, self._at_row_counts(cached)))

    def _at_row_counts(self, cached: float) -> np.ndarray:
        """Log seconds at :data:`ROW_COUNTS`, never falling; asked for several times between two observations."""
        mean, covariance = self.target.mean, self.target.covariance
        last_mean, last_covariance, behind, log_seconds = self.latest
        if last_mean is not mean or last_covariance is not covariance or behind != cached:
            correction = np.exp(mean[:-1] + mean[-1] * self._doublings(cached))
            # Errors can make more rows look cheaper; what is known best moves least where that is put right.
            precision = 1.0 / np.maximum(covariance.diagonal()[:-1], 1e-6)
            log_seconds = np.log(increasing(self.prior.target_seconds(ROW_COUNTS, cached) * correction, precision))
            self.latest = mean, covariance, cached, log_seconds
        return log_seconds

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
        noise: float | None = None,
    ) -> None:
        """Learn from one step.

        Args:
            name: of its shape.
            rows, cached: rows, and tokens in the target's cache, of all sequences together.
            batch: sequences.
            target, other: seconds of the target's forward, and of all else; 0: unknown.
            noise: standard deviation of both, log seconds; ``None``: ``settings.observation_std``.
        """
        noise = self.settings.observation_std if noise is None else noise
        if target > 0:
            self.observe_forwards(name, [rows], [target], [noise], cached=cached, steps=1)
        if other > 0:
            place = self.index[name]
            weights = np.zeros(len(self.names) + 1)
            weights[place], weights[-1] = 1.0, math.log2(batch)
            residual = math.log(self._clamped(other) / self.prior_other[place])
            self.other.observe(weights, residual, max(noise, self.settings.min_other_std))

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
        period = Period(steps)
        before = self.target.state
        self.observe_forwards(name, *period.medians(noise), cached=cached, steps=len(steps))
        self.spread.observe(period)
        if self.spread.std <= max(self.settings.calm_std, noise):
            return
        beyond = np.log(period.seconds / self.target_seconds(period.rows, cached))
        quick = period.quick(beyond)
        self.target.state = before  # as if the medians had not been learned
        # The whole machine may be slower or faster than it was: steps say how row counts compare.
        self.target.covariance = self.target.covariance + self.spread.std**2 * np.outer(*[self.target.common] * 2)
        if quick is None:
            self._update(*period.means(self.spread.std), cached=cached, slow_share=0.0)
        else:
            self._update(*period.fastest(quick, noise, self.spread.std), cached=cached)

    def observe_forwards(
        self,
        name: str,
        rows: Sequence[int],
        seconds: Sequence[float],
        noises: Sequence[float],
        *,
        cached: float,
        steps: int,
    ) -> None:
        """Learn from several forwards of the target behind about as many tokens, which is cheaper than one by one.

        Args:
            name: of the steps' shape.
            rows: of all sequences together, by forward.
            seconds, noises: by forward; noises are standard deviations of log seconds.
            cached: tokens in the target's cache, of all sequences together.
            steps: number of steps that they stand for.
        """
        self._update(rows, seconds, noises, cached=cached)
        self.steps += steps
        self.timed[name] = self.timed.get(name, 0) + steps

    def _update(
        self,
        rows: Sequence[int],
        seconds: Sequence[float],
        noises: Sequence[float],
        *,
        cached: float,
        slow_share: float | None = None,
    ) -> None:
        """Correct the target's seconds by those of several forwards."""
        weights = self.target_weights(np.array(rows, dtype=float), cached)
        # Between row counts the prior is interpolated as it is when asked for.
        near = weights[:, :-1].any(0).nonzero()[0]
        expected = weights[:, near] @ np.log(self.prior.target_seconds(ROW_COUNTS[near], cached))
        for part, prior, taken, noise in zip(weights, expected.tolist(), seconds, noises, strict=True):
            self.target.observe(part, math.log(self._clamped(taken)) - prior, noise, slow_share)

    def as_dict(self) -> dict[str, Any]:
        """All that was learned, for the disk."""
        return {
            "names": list(self.names),
            "target": self.target.as_dict(),
            "other": self.other.as_dict(),
            "steps": self.steps,
            "timed": dict(self.timed),
        }

    def load(self, data: Mapping[str, Any]) -> None:
        """Load what :meth:`as_dict` gave, of the same shapes.

        Raises:
            ValueError, KeyError, TypeError: it is not that; nothing was taken over.
        """
        if data["names"] != list(self.names):
            raise ValueError("names: of other shapes")
        steps = numbers.count("steps", data["steps"])
        timed = {
            name: numbers.count(f"timed {name}", n) for name, n in numbers.table("timed", data["timed"], int).items()
        }
        if not timed.keys() <= self.index.keys() or sum(timed.values()) != steps:
            raise ValueError("timed: of other shapes, or not as many as steps")
        before = self.target.mean, self.target.covariance
        self.target.load(data["target"])
        try:
            self.other.load(data["other"])
        except (ValueError, KeyError, TypeError):
            self.target.mean, self.target.covariance = before
            raise
        self.steps, self.timed = steps, timed
        for part in (self.target, self.other):  # the machine may be faster or slower today, for all shapes alike
            part.covariance = part.covariance.copy()
            part.covariance[:-1, :-1] += self.settings.restart_std**2

    def _doublings(self, cached: float) -> float:
        return math.log2(1.0 + cached / self.settings.prefix_unit_tokens)

    def _clamped(self, seconds: float) -> float:
        return min(max(seconds, self.settings.min_seconds), self.settings.max_seconds)


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


def _with_slope(covariance: np.ndarray, std: float) -> np.ndarray:
    """One more value, independent of the others."""
    out = np.zeros((len(covariance) + 1,) * 2)
    out[:-1, :-1] = covariance
    out[-1, -1] = std**2
    return out


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.7g}") for value in values]
