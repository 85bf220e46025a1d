"""Results as JSON and as tables; who is missing among them, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from gsd_kernels_hf.files import write_json

SCHEMA = 1


def write(folder: Path, name: str, result: Any) -> Path:
    """Write a report, or the like as plain data, to ``name``.json of a folder, which is made; the file."""
    return write_json(folder / f"{name}.json", asdict(result) if is_dataclass(result) else result)


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


class Missing(Exception):
    """One who is measured cannot take part; the text says why."""


def reason(error: Exception) -> str:
    """The text of :class:`Missing`; of any other error its kind and text in a line, at most 300 letters of it."""
    return str(error) if isinstance(error, Missing) else " ".join(f"{type(error).__name__}: {error}".split())[:300]


def lacking(why: str) -> Callable[..., Any]:
    """A stand-in for one who cannot take part: any call of it says why."""

    def call(*_: Any) -> Any:
        raise Missing(why)

    return call
