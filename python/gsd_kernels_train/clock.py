"""The minutes of a run: everything counts, reading and measuring too."""

from __future__ import annotations

import math
import time

PICKING_SHARE, MEASURING_SHARE, WRITING_SHARE = 0.08, 0.08, 0.2
"""Largest shares of a run's minutes in which the target continues the held-out text, the guesses are measured before
training (and as long after it), and the target writes its own text."""


class RunClock:
    """The rest of a run's minutes, counted over all the times that it was begun.

    Args:
        minutes: of the run; ``None``: no limit.
        begun: of this time, on the clock of ``time.monotonic``; ``None``: now.

    Attributes:
        earlier: seconds of earlier times, of what is not done again; see :meth:`spent_earlier`.
    """

    def __init__(self, minutes: float | None, begun: float | None = None) -> None:
        self.minutes = minutes
        self.begun = time.monotonic() if begun is None else begun
        self.earlier = 0.0

    @property
    def limited(self) -> bool:
        """Return whether there is a limit."""
        return self.minutes is not None

    @property
    def seconds(self) -> float:
        """Of the whole run; infinite without a limit."""
        return math.inf if self.minutes is None else 60 * self.minutes

    @property
    def used(self) -> float:
        """Seconds that are gone."""
        return time.monotonic() - self.begun + self.earlier

    @property
    def left(self) -> float:
        """Seconds that are left; infinite without a limit."""
        return self.seconds - self.used

    def spent_earlier(self, seconds: float) -> None:
        """Count what an earlier time of the same run left behind."""
        self.earlier += seconds

    def share(self, share: float) -> float:
        """Seconds of a share of the run, or what is left if that is less."""
        return max(0.0, min(share * self.seconds, self.left))

    def check(self, doing: str) -> None:
        """Raise where nothing is left.

        Raises:
            RuntimeError: it says what the time went by with.
        """
        if self.left <= 0:
            raise NothingLearned(f"the {spoken(self.seconds)} are over {doing}, before the training began")


class NothingLearned(RuntimeError):
    """A run that ended without a step."""

    def __init__(self, why: str) -> None:
        super().__init__(f"nothing was learned, and nothing is written: {why}; give more by --minutes, or less text")


def spoken(seconds: float) -> str:
    """``90 s`` or ``15 minutes``."""
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds / 60:.3g} minutes"
