"""Tables of numbers that several commands print."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from .output import table

if TYPE_CHECKING:
    from gsd_kernels_hf import GenerationStats


def stats_table(stats: GenerationStats) -> Table:
    """The statistics of one ``generate`` call."""
    result = table("", "<")
    result.show_header = False
    for name, text in stats.table():
        result.add_row(name, escape(text))
    return result


def size(number: float | None) -> str:
    """Bytes in MiB, or a dash for what could not be measured."""
    return "–" if number is None else f"{number / 2**20:.1f} MiB"


def speed(ratio: float) -> str:
    """``1.62× as fast``, or plainly slower."""
    return f"{ratio:.2f}× as fast" + ("" if ratio >= 1 else " (slower)")
