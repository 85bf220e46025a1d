"""Results of the kernel cases as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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

    def table(self) -> str:
        """A Markdown table of all measurements."""
        return table(self.measured(), OF_A_CASE)

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


Columns = Mapping[str, Callable[[Any], str]]
"""Header of a column → what a row's cell in it says."""


def table(rows: Iterable[Any], columns: Columns) -> str:
    """Rows as a Markdown table; the first column is text, the others are right-aligned."""
    lines = [[*columns], *([cell(row) for cell in columns.values()] for row in rows)]
    head, *body = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([head, "|---" + "|--:" * (len(columns) - 1) + "|", *body])


def micros(seconds: float) -> str:
    """Seconds as µs, ms or s with three digits."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


OF_A_CASE: Columns = {
    "": lambda row: ", ".join(
        [row.operation, row.shape, *(f"{name} {value}" for name, value in row.parameters.items())]
    ),
    "by": lambda row: row.contestant,
    "median": lambda row: micros(row.median),
    "p20–p80": lambda row: f"{micros(row.p20)}–{micros(row.p80)}",
    "of copy bandwidth": lambda row: f"{row.bandwidth_fraction:.2f}",
}
