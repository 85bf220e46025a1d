"""Progress of what takes long, with totals: a bar on a terminal, elsewhere a line in the log now and then."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("gsd_kernels.progress")
"""Told of progress where stderr is no terminal; the command line prints what it says."""

EVERY = 10.0
"""Seconds between two lines of the log."""

PATIENCE = 2.0
"""Seconds before the first."""

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
        yield _lines(what, total, unit)


def _count(done: float, total: float | None, unit: str) -> str:
    return f"{done:,.0f} {unit}" if total is None else f"{done:,.0f} of {total:,.0f} {unit}"


def _lines(what: str, total: float | None, unit: str) -> Update:
    begin = time.monotonic()
    due = begin + PATIENCE

    def update(done: float, note: str = "") -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due:
            due = now + EVERY
            more = f", {note}" if note else ""
            logger.info("%s: %s%s, %.0f s so far", what, _count(done, total, unit), more, now - begin)

    return update


@contextmanager
def _bar(what: str, total: float | None, unit: str) -> Iterator[Update]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(escape(what), total=total, count=_count(0, total, unit))

        def update(done: float, note: str = "") -> None:
            count = _count(done, total, unit) + (f", {note}" if note else "")
            bars.update(task, completed=done, count=escape(count))

        yield update
