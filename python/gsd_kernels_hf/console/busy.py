"""Whether other programs use the machine's processors."""

from __future__ import annotations

import os
from pathlib import Path

BUSY = 0.15
"""Share of the machine's processor time, taken by others, above which times are not to be trusted."""

STAT = Path("/proc/stat")
IDLE = (3, 4)  # columns of its first line: idle, and waiting for disks
GUEST = 8  # from here on what other columns count already


class Others:
    """What others take of the machine's processor time from here on."""

    def __init__(self) -> None:
        self.begin = _seconds()

    def share(self) -> float | None:
        """0 … 1 of all processors; ``None`` where the system does not say."""
        now = _seconds()
        if self.begin is None or now is None or now[0] <= self.begin[0]:
            return None
        every, busy, own = (after - before for after, before in zip(now, self.begin, strict=True))
        return min(1.0, max(0.0, (busy - own) / every))


def _seconds() -> tuple[float, float, float] | None:
    """Of all processors since the system began: passed, not idle; and used by this process and its children."""
    try:
        columns = [int(ticks) for ticks in STAT.read_text().splitlines()[0].split()[1 : 1 + GUEST]]
    except (OSError, ValueError, IndexError):
        return None
    second = os.sysconf("SC_CLK_TCK")
    idle = sum(columns[at] for at in IDLE)
    return sum(columns) / second, (sum(columns) - idle) / second, sum(os.times()[:4])
