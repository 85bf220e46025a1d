"""Progress of what takes long, with totals: a bar on a terminal, elsewhere a line in the log now and then."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("gsd_kernels.progress")
"""Told of progress where stderr is no terminal; the command line prints what it says."""

WAIT_SECONDS, LINE_SECONDS = 2.0, 10.0
"""Seconds before the first line of the log, and between two."""

Update = Callable[..., None]
"""``(done, note="")``: how much is done, in the units of the total, and what else there is to say."""


@contextmanager
def tracked(what: str, total: float | None, unit: str) -> Iterator[Update]:
    """Show how much of something is done while the block runs.

    Args:
        what: is being done.
        total: of the units; ``None`` where it is not known.
        unit: of the total and of what is done, in the plural.

    Returns:
        What gives the block the function to call with what is done so far, as often as one likes.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    name, count = (TextColumn(f"{{task.{part}}}", markup=False) for part in ("description", "fields[count]"))
    # Today's stderr: what runs may be silenced by another one meanwhile.
    bars = Progress(name, BarColumn(), count, TimeElapsedColumn(), console=Console(file=sys.stderr), transient=True)
    task = bars.add_task(what, total=total, count="")

    def update(done: float, note: str = "") -> None:
        said = f"{done:,.0f} {unit}" if total is None else f"{done:,.0f} of {total:,.0f} {unit}"
        bars.update(task, completed=done, count=f"{said}, {note}" if note else said)

    update(0)
    if sys.stderr is not None and sys.stderr.isatty():
        with bars:
            yield update
        return
    over = threading.Event()

    def tell() -> None:  # in a thread of its own: also while nothing is done, as in one long run
        pause = WAIT_SECONDS
        while not over.wait(pause):
            (shown,) = bars.tasks
            logger.info("%s: %s, %.0f s so far", what, shown.fields["count"], shown.elapsed)
            pause = LINE_SECONDS

    teller = threading.Thread(target=tell, name="gsd_kernels.progress", daemon=True)
    teller.start()
    try:
        yield update
    finally:
        over.set()
        teller.join()
