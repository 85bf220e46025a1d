"""Results of the kernel cases as JSON, CSV and a plot, and how they compare with earlier ones."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
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
        """Write ``name`` as .json, .csv and (with matplotlib) .png; the files written."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [write_json(folder / f"{name}.json", asdict(self)), self._write_csv(folder / f"{name}.csv")]
        plot = folder / f"{name}.png"
        if self.plot(plot):
            paths.append(plot)
        return paths

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

    def _write_csv(self, path: Path) -> Path:
        names = list(dict.fromkeys(name for row in self.rows for name in row.parameters))
        columns = [f.name for f in fields(Row) if f.name != "parameters"]
        versions = self.environment["versions"]
        shared = {"case": self.case, "dtype": self.dtype, "copy_bandwidth": self.copy_bandwidth}
        shared |= {key: self.environment[key] for key in ("device", "threads", "commit", "date")} | versions
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*shared, *columns[:2], *names, *columns[2:]])
            writer.writeheader()
            for row in self.rows:
                values = {key: getattr(row, key) for key in columns}
                writer.writerow({**shared, **values, **row.parameters})
        return path

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

    def plot(self, path: Path) -> bool:
        """Time over ``x``, one panel for every other combination of parameters; ``False`` without matplotlib."""
        try:
            import matplotlib
        except ImportError:
            return False
        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
        from matplotlib.ticker import (
            EngFormatter,
            FixedLocator,
            LogLocator,
            NullFormatter,
            NullLocator,
            StrMethodFormatter,
        )

        rows = self.measured()
        if not rows:
            return False
        panels = list(dict.fromkeys(self._panel(row) for row in rows))
        names = list(dict.fromkeys(row.contestant for row in rows))
        columns = min(len(panels), 4)
        lines = math.ceil(len(panels) / columns)
        figure, axes = plt.subplots(
            lines, columns, figsize=(max(6.4, 3.7 * columns), 2.9 * lines + 1.5), squeeze=False, layout="constrained"
        )
        for place, axis in enumerate(axes.flat):
            if place >= len(panels):
                axis.set_visible(False)
                continue
            inside = [row for row in rows if self._panel(row) == panels[place]]
            for number, name in enumerate(names):
                points = sorted((row for row in inside if row.contestant == name), key=lambda r: r.parameters[self.x])
                if not points:
                    continue
                xs = [row.parameters[self.x] for row in points]
                style = {"color": f"C{number % 10}", "marker": "os^Dvx"[number % 6], "markersize": 4, "linewidth": 1.4}
                style["linestyle"] = "--" if points[0].peer else "-"
                axis.plot(xs, [row.median for row in points], **style)
                band = [[getattr(row, p) for row in points] for p in ("p20", "p80")]
                axis.fill_between(xs, *band, color=style["color"], alpha=0.15, linewidth=0)
            ticks = sorted({row.parameters[self.x] for row in inside})
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.xaxis.set_major_locator(FixedLocator(ticks))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(EngFormatter(unit="s"))
            axis.yaxis.set_minor_formatter(NullFormatter())
            axis.set_title(panels[place], fontsize=9)
            axis.grid(True, which="major", alpha=0.3)
            axis.tick_params(labelsize=8)
        for axis in axes[:, 0]:
            axis.set_ylabel("median, p20–p80", fontsize=8)
        for axis in axes[-1]:
            axis.set_xlabel(self.x, fontsize=8)
        handles = [
            plt.Line2D([], [], color=f"C{n % 10}", marker="os^Dvx"[n % 6], markersize=4, label=name,
                       linestyle="--" if any(r.peer for r in rows if r.contestant == name) else "-")
            for n, name in enumerate(names)
        ]  # fmt: skip
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(names), 4), fontsize=8, frameon=False)
        figure.suptitle(f"{self.case}, {self.dtype}, {caption(self.environment)}", fontsize=10)
        figure.savefig(path, dpi=120)
        plt.close(figure)
        return True

    def _panel(self, row: Row) -> str:
        others = [f"{name} {value}" for name, value in row.parameters.items() if name != self.x]
        return "\n".join(part for part in (row.operation, ", ".join([row.shape, *others])) if part)


def caption(environment: dict[str, Any]) -> str:
    """Device and versions in one short line."""
    versions = environment["versions"]
    threads = f", {environment['threads']} threads" if environment["device_type"] == "cpu" else ""
    found = environment.get("instructions")  # which results of before 2026-11-23 do not hold
    return f"{environment['device']}{f' ({found})' if found else ''}{threads}, torch {versions['torch']}"


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
