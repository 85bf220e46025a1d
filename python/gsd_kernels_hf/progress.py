"""Progress of what takes long, with totals: a bar on a terminal, elsewhere a line in the log now and then."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

logger = logging.getLogger("gsd_kernels.progress")
"""Told of progress where stderr is no terminal; the command line prints what it says."""

WAIT_SECONDS, LINE_SECONDS = 2.0, 10.0
"""Seconds before the first line of the log, and between two."""

Update = Callable[..., None]
"""``(done, note="")``: how much is done, in the units of the total, and what else there is to say."""


def tracked(what: str, total: float | None, unit: str) -> AbstractContextManager[Update]:
    """Show how much of something is done while the block runs.

    Args:
        what: is being done.
        total: of the units; ``None`` where it is not known.
        unit: of the total and of what is done, in the plural.

    Returns:
        What gives the block the function to call with what is done so far, as often as one likes.
    """
    shown = _bar if sys.stderr is not None and sys.stderr.isatty() else _lines
    return shown(what, total, unit)


def _count(done: float, total: float | None, unit: str, note: str) -> str:
    count = f"{done:,.0f} {unit}" if total is None else f"{done:,.0f} of {total:,.0f} {unit}"
    return f"{count}, {note}" if note else count


@contextmanager
def _lines(what: str, total: float | None, unit: str) -> Iterator[Update]:
    begin, latest, over = time.monotonic(), (0.0, ""), threading.Event()

    def update(done: float, note: str = "") -> None:
        nonlocal latest
        latest = done, note

    def tell() -> None:  # in a thread of its own: also while nothing is done, as in one long run
        pause = WAIT_SECONDS
        while not over.wait(pause):
            done, note = latest
            logger.info("%s: %s, %.0f s so far", what, _count(done, total, unit, note), time.monotonic() - begin)
            pause = LINE_SECONDS

    teller = threading.Thread(target=tell, name="gsd_kernels.progress", daemon=True)
    teller.start()
    try:
        yield update
    finally:
        over.set()
        teller.join()


@contextmanager
def _bar(what: str, total: float | None, unit: str) -> Iterator[Update]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn())
    # Today's stderr: what runs may be silenced by another one meanwhile.
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bars:
        task = bars.add_task(escape(what), total=total, count=_count(0, total, unit, ""))

        def update(done: float, note: str = "") -> None:
            bars.update(task, completed=done, count=escape(_count(done, total, unit, note)))

        yield update
