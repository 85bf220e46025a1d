"""Seconds of a step's parts: a prior known without measuring, corrected by running medians of what steps took.

The prior is arithmetic: bytes that a forward reads over the memory's bandwidth, multiplications of more rows than hide
behind that, and a little for every layer. What steps really take corrects its logarithm: of the target's forward by row
counts, of all else in a step by shapes. A median of the latest steps shrugs off single slow ones. Other programs slow
all steps down whatever those forward, so each step is held against the *pace* of the machine, that of the quickest
quarter of the last few steps of all kinds. What lasts moves the pace alone, and slower steps are left out: neither says
how row counts compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gsd_kernels import GraphConfig
from gsd_kernels.config import PLAIN

from .prior import CostPrior

# Row counts, of all sequences together, at which seconds are known: 1, 2, 3 … 16, 24, 32, 48 … 16384. Kernels take
# several rows at a time, so 11 may cost what 8 do, and 12 more.
ROW_COUNTS = np.union1d(np.arange(1.0, 17.0), np.append(2.0 ** np.arange(15), 3.0 * 2.0 ** np.arange(13)))
LOG2_ROWS = np.log2(ROW_COUNTS)
REMEMBERED_STEPS = 15  # of a row count, or of a shape
PACE_STEPS = 12  # by which the machine's pace is known
QUICK_SHARE = 0.25  # of them, at least, that other programs do not disturb
# Log seconds: steps slower by more than SLOW and what is uncertain, or by MAX_SLOW, were disturbed.
SLOW, MAX_SLOW = 0.25, 0.8
MIN_ALIKE = 4  # such steps with as many rows, all of which are slow, are not by chance
SURE_STD = 0.1  # steps of what is known better say what the machine's pace is
# Standard deviations of log seconds against what was timed: of a forward, per square root of a doubling of its rows
# from the closest row count that was; of all else in steps of a shape that was not.
ROWS_STD, SHAPE_STD = 0.3, 0.4
MIN_SECONDS, MAX_SECONDS = 1e-7, 1e4  # of a part of a step, as it is observed


def lower_quartile(latest: np.ndarray) -> np.ndarray:
    """The lower quartile of the latest observations, [..., n] with NaN where there is none yet: [...]."""
    known = (~np.isnan(latest)).sum(-1, keepdims=True)
    place = (QUICK_SHARE * np.maximum(known - 1, 0)).astype(int)
    return np.take_along_axis(np.sort(latest), place, -1)[..., 0]  # NaN is last


class CostModel:
    """Seconds of a step's parts by rows, cached tokens and shape. Threads share it without a lock.

    Args:
        prior: of the pair.
        shapes: by name, those that steps can have.

    Attributes:
        target, other: log(seconds / prior) beside the pace, of the latest steps [n, REMEMBERED_STEPS], the newest last,
            NaN where there was none yet: of the target's forward by row count, of all else by name.
        timed: number of timed steps, as ``other`` by name, int [1 + shapes].
    """

    def __init__(self, prior: CostPrior, shapes: Mapping[str, GraphConfig]) -> None:
        self.prior = prior
        self.names = (PLAIN, *shapes)  # plain: no speculation
        self.index = {name: i for i, name in enumerate(self.names)}
        self.prior_other = np.array([prior.other_seconds(None), *(prior.other_seconds(s) for s in shapes.values())])
        self.kinds = np.array([0, *(1 if shape.depth else 2 for shape in shapes.values())])
        self.target, self.other = (np.full((n, REMEMBERED_STEPS), np.nan) for n in (len(ROW_COUNTS), len(self.names)))
        self.paces = np.zeros(0)  # log(seconds / predicted without a pace) of the latest steps
        self.pace = 0.0
        self.timed = np.zeros(len(self.names), dtype=np.int64)

    @property
    def steps(self) -> int:
        """Number of timed steps."""
        return int(self.timed.sum())

    def target_seconds(self, rows: np.ndarray, cached: float) -> np.ndarray:
        """Seconds of target forwards, rows [S] of all sequences together; never less for more rows."""
        return np.exp(self.pace) * self._forwards(rows, cached)

    def other_seconds(self) -> np.ndarray:
        """All else in a step, by name: of plain decoding and of every shape, [1 + shapes]."""
        return np.exp(self.pace) * self._besides()

    def target_std(self, rows: np.ndarray) -> np.ndarray:
        """Standard deviations of forwards' log seconds against those of the closest row count that was timed: [S]."""
        seen = ~np.isnan(lower_quartile(self.target))
        if not seen.any():
            return np.full(len(rows), ROWS_STD)
        apart = np.abs(np.log2(np.maximum(rows, 1.0))[:, None] - LOG2_ROWS[seen]).min(1)
        return ROWS_STD * np.sqrt(np.maximum(apart - 0.05, 0.0))

    def other_std(self) -> np.ndarray:
        """Standard deviations of the log seconds of all else, by name: 0 of what was timed, [1 + shapes]."""
        return np.where(np.isnan(lower_quartile(self.other)), SHAPE_STD, 0.0)

    def observe(self, name: str, cached: float, steps: Sequence[tuple[int, float, float]]) -> None:
        """Learn from successive steps.

        Args:
            name: of their shape.
            cached: tokens in the target's cache, of all sequences together.
            steps: rows of all sequences together, seconds of the target's forward, and of all else.
        """
        if not steps:
            return
        rows, target, other = np.clip(np.array(steps, dtype=float), MIN_SECONDS, MAX_SECONDS).T  # [n] each
        place = self.index[name]
        self.timed[place] += len(steps)
        unsure = self.target_std(rows) + self.other_std()[place]  # [n]
        paces = np.log((target + other) / (self._forwards(rows, cached) + self._besides()[place]))
        sure = (unsure < SURE_STD) | (self.paces.size == 0)
        if sure.any():
            self.paces = np.append(self.paces, paces[sure])[-PACE_STEPS:]
            self.pace = float(lower_quartile(self.paces))
        # A step that is slow beyond what is uncertain was disturbed; quick by accident is none.
        quick = paces - self.pace < np.minimum(SLOW + 2.0 * unsure, MAX_SLOW)
        forward = np.log(target / self.prior.target_seconds(rows, cached)) - self.pace
        counts = np.abs(LOG2_ROWS - np.log2(rows)[:, None]).argmin(1)
        for count in set(counts.tolist()):
            alike = counts == count
            if alike.sum() >= MIN_ALIKE and not (quick & alike).any():  # so much slower they are
                quick |= alike
            _append(self.target[count], forward[quick & alike])
        _append(self.other[place], np.log(other[quick] / self.prior_other[place]) - self.pace)

    def _forwards(self, rows: np.ndarray, cached: float) -> np.ndarray:
        """Seconds of forwards at the usual pace."""
        found = lower_quartile(self.target)
        seen = ~np.isnan(found)
        correction = np.interp(LOG2_ROWS, LOG2_ROWS[seen], found[seen]) if seen.any() else 0.0
        logs = np.log(self.prior.target_seconds(ROW_COUNTS, cached)) + correction
        # Errors can make more rows look cheaper: halfway between the closest rising curves above and below.
        logs = (np.maximum.accumulate(logs) + np.minimum.accumulate(logs[::-1])[::-1]) / 2
        return np.exp(np.interp(np.log2(np.maximum(rows, 1.0)), LOG2_ROWS, logs))

    def _besides(self) -> np.ndarray:
        """Seconds of all else at the usual pace, by name; what was not timed is corrected as others of its kind."""
        found = lower_quartile(self.other)
        for kind in set(self.kinds.tolist()):
            alike = self.kinds == kind
            known = found[alike & ~np.isnan(found)]
            found[alike & np.isnan(found)] = known.mean() if known.size else 0.0
        return self.prior_other * np.exp(found)

    def arrays(self) -> dict[str, np.ndarray]:
        """All that is kept on disk, in place; the machine may have another pace another day."""
        return {"target": self.target, "other": self.other, "timed": self.timed}


def _append(latest: np.ndarray, values: np.ndarray) -> None:
    latest[:] = np.append(latest, values)[-REMEMBERED_STEPS:]
