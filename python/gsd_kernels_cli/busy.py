"""The share of the machine's processors that other programs take."""

from __future__ import annotations

import os
from pathlib import Path

BUSY_SHARE = 0.15
"""Share of the machine's processor time, taken by others, above which times are not to be trusted."""

PROC = Path("/proc")
STAT = PROC / "stat"
IDLE = (3, 4)  # columns of its first line: idle, and waiting for disks
GUEST = 8  # from here on what other columns count already
PARENT = 1  # column of a process's line, behind its name
TIMES = slice(11, 15)  # its ticks, and those of its children that ended


def distrust(share: float | None) -> str | None:
    """The warning for times that were measured while others took this share; ``None`` where they can be trusted."""
    if share is None or share <= BUSY_SHARE:
        return None
    return f"This machine was busy with other work ({share:.0%} of its processors): do not trust these times."


class Others:
    """The share of the machine's processor time that others take from here on."""

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
    """Of all processors since the system began: passed, not idle; and used by this process and those it started."""
    try:
        columns = [int(ticks) for ticks in STAT.read_text().splitlines()[0].split()[1 : 1 + GUEST]]
    except (OSError, ValueError, IndexError):
        return None
    second = os.sysconf("SC_CLK_TCK")
    idle = sum(columns[at] for at in IDLE)
    own = sum(os.times()[:4]) + _of_descendants() / second
    return sum(columns) / second, (sum(columns) - idle) / second, own


def _of_descendants() -> int:
    """Ticks of the living processes that this one started, and theirs: engines of a race, a server."""
    found: dict[int, tuple[int, int]] = {}  # by number: its parent, its ticks and those of its children that ended
    for file in PROC.glob("[0-9]*/stat"):
        try:
            columns = file.read_text().rpartition(")")[2].split()
            found[int(file.parent.name)] = int(columns[PARENT]), sum(int(ticks) for ticks in columns[TIMES])
        except (OSError, ValueError, IndexError):  # it ended meanwhile
            continue
    ticks, families = 0, [os.getpid()]
    while families:
        above = families.pop()
        for number, (parent, its) in found.items():
            if parent == above:
                ticks += its
                families.append(number)
    return ticks
