"""Results of the kernel cases as JSON, and how they compare with earlier ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
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
    detail: str | None = None
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

    @property
    def key(self) -> tuple[Any, ...]:
        """Identity of the row across results."""
        return self.operation, self.shape, tuple(sorted(self.parameters.items())), self.contestant


@dataclass
class Report:
    """One run of one kernel case."""

    case: str
    x: str
    environment: dict[str, Any]
    copy_bandwidth: float
    dtype: str
    quick: bool
    rows: list[Row] = field(default_factory=list)
    schema: int = SCHEMA

    def write(self, folder: Path, name: str) -> list[Path]:
        """Write ``name``.json; the files written."""
        return [write_json(folder / f"{name}.json", asdict(self))]

    @classmethod
    def read(cls, path: Path) -> Report:
        """Raises:
        ValueError: not a result of a kernel case.
        """
        try:
            return cls.of(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def of(cls, data: dict[str, Any]) -> Report:
        """Raises:
        ValueError: not the fields of a result of a kernel case.
        """
        if data.get("schema") != SCHEMA or "rows" not in data:
            raise ValueError(f"not a result of gsd-kernels bench of schema {SCHEMA}")
        return cls(**{**data, "rows": [Row(**row) for row in data["rows"]]})

    def measured(self) -> list[Row]:
        return [row for row in self.rows if row.median is not None]

    def missing(self) -> dict[str, str]:
        """Contestants without a single measurement, and why."""
        present = {row.contestant for row in self.measured()}
        return {row.contestant: row.missing for row in self.rows if row.contestant not in present and row.missing}

    def compare(self, earlier: Report) -> list[tuple[Row, float]]:
        """Rows that both results hold, with the earlier time over this one's (above 1 is faster now)."""
        before = {row.key: row.median for row in earlier.measured()}
        return [(row, before[row.key] / row.median) for row in self.measured() if before.get(row.key)]


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


def speedups(report: Report) -> Iterator[tuple[Row, Row]]:
    """Every best measurement of ours beside the best peer's at the same point."""
    points: dict[tuple[Any, ...], dict[bool, Row]] = {}
    for row in report.measured():
        best = points.setdefault(row.key[:3], {})
        if row.peer not in best or (row.median or 0) < (best[row.peer].median or 0):
            best[row.peer] = row
    for best in points.values():
        if len(best) == 2:
            yield best[False], best[True]
