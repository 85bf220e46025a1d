"""Tables of numbers that several commands print."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from ..console.output import table

if TYPE_CHECKING:
    from gsd_kernels_hf import GenerationStats


def stats_table(stats: GenerationStats) -> Table:
    """The statistics of one ``generate`` call."""
    result = table("statistic", "value", "<")
    plain = stats.new_tokens / max(stats.sequences, 1)
    seconds = stats.seconds
    rate = stats.new_tokens / seconds["total"] if seconds.get("total") else 0.0
    result.add_row("new tokens", f"{stats.new_tokens}", f"{rate:.1f} tokens/s, prompt included")
    result.add_row("target forwards", f"{stats.steps}", f"plain decoding: about {plain:.0f}")
    result.add_row("tokens per step", f"{stats.tokens_per_step:.2f}", "1 is plain decoding")
    result.add_row("rows: target, draft", f"{stats.target_rows}, {stats.draft_rows}", "padding included")
    way = "one operator" if stats.why_modules is None else "its modules"
    result.add_row("target's rows", way, escape(stats.why_modules or ""))
    result.add_row("merge edges", f"{stats.merges}", f"{stats.accepted_merges} on accepted paths")
    result.add_row("caches", size(stats.cache_bytes), "both models")
    parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if name != "total")
    result.add_row("seconds", f"{seconds.get('total', 0.0):.2f}", parts)
    return result


def size(number: float | None) -> str:
    """Bytes in MiB, or a dash for what could not be measured."""
    return "–" if number is None else f"{number / 2**20:.1f} MiB"


def speed(ratio: float) -> str:
    """``1.62× as fast``, or plainly slower."""
    return f"{ratio:.2f}× as fast" + ("" if ratio >= 1 else " (slower)")
