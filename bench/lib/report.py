"""Results of the kernel cases as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gsd_kernels_hf.files import write_json

SCHEMA = 1


@dataclass
class Row:
    """One contestant at one point; times in seconds, ``None`` where it is missing."""

    operation: str
    shape: str
    parameters: dict[str, Any]
    contestant: str
    peer: bool = False
    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    samples: int = 0
    clock: str | None = None
    bytes_moved: int | None = None
    bandwidth_fraction: float | None = None  # of the copy bandwidth measured in the same run
    max_error: float | None = None
    setup_seconds: float | None = None
    missing: str | None = None


@dataclass
class Report:
    """One run of one kernel case."""

    case: str
    environment: dict[str, Any]
    copy_bandwidth: float
    dtype: str
    quick: bool
    rows: list[Row] = field(default_factory=list)
    schema: int = SCHEMA

    def write(self, folder: Path, name: str) -> list[Path]:
        """Write ``name``.json; the files written."""
        return [write(folder, name, asdict(self))]

    def measured(self) -> list[Row]:
        return [row for row in self.rows if row.median is not None]

    def missing(self) -> dict[str, str]:
        """Contestants without a single measurement, and why."""
        present = {row.contestant for row in self.measured()}
        return {row.contestant: row.missing for row in self.rows if row.contestant not in present and row.missing}


def write(folder: Path, name: str, data: dict[str, Any]) -> Path:
    """Write ``name``.json into a folder, which is made; the file."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_json(folder / f"{name}.json", data)


def caption(environment: dict[str, Any]) -> str:
    """Device and versions in one short line."""
    versions = environment["versions"]
    threads = f", {environment['threads']} threads" if environment["device_type"] == "cpu" else ""
    instructions = environment.get("instructions")  # which results of before 2026-11-23 do not hold
    return f"{environment['device']}{f' ({instructions})' if instructions else ''}{threads}, torch {versions['torch']}"


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are right-aligned."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    return "\n".join([line(headers), "|---" + "|--:" * (len(headers) - 1) + "|", *map(line, rows)])


def micros(seconds: float) -> str:
    """Seconds as µs, ms or s with three digits."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
