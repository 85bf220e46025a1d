"""Progress of what takes long, with totals: a bar on a terminal, elsewhere a line in the log now and then."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("gsd_kernels.progress")
"""Told of progress where stderr is no terminal; the command line prints what it says."""

LINE_SECONDS = 10.0
"""Seconds between two lines of the log."""

WAIT_SECONDS = 2.0
"""Seconds before the first."""

LOOK_SECONDS = 1.0
"""Seconds between two looks whether a line is due while nothing is done, as in one long run."""

Update = Callable[..., None]
"""``(done, note="")``: how much is done, in the units of the total, and what else there is to say."""


@contextmanager
def tracked(what: str, total: float | None, unit: str) -> Iterator[Update]:
    """Show how much of something is done while the block runs.

    Args:
        what: is being done.
        total: of the units; ``None`` where it is not known.
        unit: of the total and of what is done, in the plural.

    Yields:
        The function to call with what is done so far, as often as one likes.
    """
    if sys.stderr is not None and sys.stderr.isatty():
        with _bar(what, total, unit) as update:
            yield update
    else:
        with _lines(what, total, unit) as update:
            yield update


def _count(done: float, total: float | None, unit: str) -> str:
    return f"{done:,.0f} {unit}" if total is None else f"{done:,.0f} of {total:,.0f} {unit}"


@contextmanager
def _lines(what: str, total: float | None, unit: str) -> Iterator[Update]:
    begin = time.monotonic()
    due, latest = begin + WAIT_SECONDS, (0.0, "")
    lock, over = threading.Lock(), threading.Event()

    def say() -> None:
        nonlocal due
        now = time.monotonic()
        with lock:
            if now < due:
                return
            due = now + LINE_SECONDS
            done, note = latest
        more = f", {note}" if note else ""
        logger.info("%s: %s%s, %.0f s so far", what, _count(done, total, unit), more, now - begin)

    def update(done: float, note: str = "") -> None:
        nonlocal latest
        latest = done, note
        say()

    def look() -> None:
        while not over.wait(LOOK_SECONDS):
            say()

    watch = threading.Thread(target=look, name="gsd_kernels.progress", daemon=True)
    watch.start()
    try:
        yield update
    finally:
        over.set()
        watch.join()


@contextmanager
def _bar(what: str, total: float | None, unit: str) -> Iterator[Update]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn())
    # Today's stderr: what runs may be silenced by another one meanwhile.
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bars:
        task = bars.add_task(escape(what), total=total, count=_count(0, total, unit))

        def update(done: float, note: str = "") -> None:
            count = _count(done, total, unit) + (f", {note}" if note else "")
            bars.update(task, completed=done, count=escape(count))

        yield update
