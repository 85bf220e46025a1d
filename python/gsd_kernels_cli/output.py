"""Consoles, tables, progress and exit codes."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

OK, FAILURE, USAGE, DIFFERS, INTERRUPTED = 0, 1, 2, 3, 130

EXIT_CODES = (
    "Exit codes: 0 success; 1 failure; 2 bad arguments; 3 the output differs from plain decoding beyond rounding "
    "(check, demo); 130 interrupted. Text and tables go to stdout, progress and errors to stderr."
)

WAIT_SECONDS = 2.0
"""Seconds after which a silent command reports what it is doing."""

out, err = (Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True) for stderr in (False, True))


def only_first_rank_prints() -> None:
    """Silence the other processes that torchrun started; errors are printed by all.

    Raises:
        ValueError: the environment's ``RANK`` is no number.
    """
    rank = os.environ.get("RANK", "0")
    if not rank.isdecimal():
        raise ValueError(f"RANK: expected a number, as torchrun sets it, got {rank!r}; unset it")
    if int(rank) > 0:
        out.quiet = err.quiet = True
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, open as long as the process


def show_replacements() -> None:
    """Have standard output and error show a replacement for a character that their encoding has not."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Report on stderr what is being done: a spinner on a terminal, elsewhere one line once it takes two seconds."""
    if err.is_terminal:
        with err.status(what):
            yield
        return
    timer = threading.Timer(WAIT_SECONDS, err.print, (f"{what} …",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Lines(logging.Handler):
    """Prints what a logger says, as the command's own lines."""

    def emit(self, record: logging.LogRecord) -> None:
        err.print(f"gsd-kernels: {record.getMessage()}")


_LINES = _Lines()


def show_progress() -> None:
    """Print the lines of :mod:`gsd_kernels_hf.progress` on stderr, where that is no terminal for its bars."""
    logger = logging.getLogger("gsd_kernels.progress")
    logger.addHandler(_LINES)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def print_json(value: Any) -> None:
    """Plain JSON on stdout, never wrapped or coloured."""
    out.print(json.dumps(value, indent=2, ensure_ascii=False))


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """An undecorated table; the first column is text, the others are numbers. A leading ``<`` aligns left."""
    result = Table(box=None, pad_edge=False, header_style="dim", show_header=headers != ["", "<"])
    for place, header in enumerate(headers):
        left = place == 0 or header.startswith("<")
        result.add_column(header.removeprefix("<"), justify="left" if left else "right", no_wrap=not left)
    for row in rows:
        result.add_row(*row)
    return result
