"""Counts Triton's compilations while something runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Compilation:
    """One kernel that was made ready: compiled, or read from the cache on disk.

    Attributes:
        kernel: its name.
        seconds: what that took.
        cached: whether it was read.
    """

    kernel: str
    seconds: float
    cached: bool


@contextmanager
def compilations() -> Iterator[list[Compilation]]:
    """A list that grows by every kernel that Triton compiles inside; it stays empty without Triton."""
    compiled: list[Compilation] = []
    try:
        from triton import knobs
    except ImportError:
        yield compiled
        return

    def listener(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        name = metadata.get("name") if isinstance(metadata, dict) else getattr(metadata, "name", None)
        compiled.append(Compilation(str(name or src), times.total / 1e6, cache_hit))

    before = knobs.compilation.listener
    knobs.compilation.listener = listener
    try:
        yield compiled
    finally:
        knobs.compilation.listener = before


def summary(found: list[Compilation]) -> dict[str, Any]:
    """Counts and seconds, and the kernels that were compiled with the seconds of each."""
    compiled = [c for c in found if not c.cached]
    return {
        "compiled": len(compiled),
        "compile_seconds": sum(c.seconds for c in compiled),
        "read_from_cache": len(found) - len(compiled),
        "cache_seconds": sum(c.seconds for c in found if c.cached),
        "kernels": [[c.kernel, round(c.seconds, 3)] for c in sorted(compiled, key=lambda c: -c.seconds)],
    }
