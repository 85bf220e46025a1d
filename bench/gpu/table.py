"""The stages' records of one device as a table: forwards of rows by operator and by modules, captured steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..lib.report import markdown

WAYS = ("operator", "modules")


def _read(folder: Path, stage: str) -> dict[str, Any]:
    return json.loads((folder / f"{stage}.json").read_text(encoding="utf-8"))


def table(folder: Path, place: Callable[[dict[str, Any]], str]) -> str:
    """One device's forwards by rows, and its captured steps where they were measured.

    Args:
        folder: of the stages' records; ``rows`` is there.
        place: describes where a result comes from.
    """
    data = _read(folder, "rows")
    points = [point for point in data["points"].values() if "rows" in point]
    counts = sorted({point["rows"] for point in points})
    lines = []
    for shape in dict.fromkeys(point["shape"] for point in points):
        floors = {point["rows"]: point["floor_seconds"] for point in points if point["shape"] == shape}
        for way in dict.fromkeys(point["setting"] for point in points):
            medians = {p["rows"]: p["median"] for p in points if (p["shape"], p["setting"]) == (shape, way)}
            lines.append([f"{shape}, {way}", *_milliseconds(medians, counts)])
        lines.append([f"{shape}, reading", *_milliseconds(floors, counts)])
    parts = [
        f"{place(data['environment'])}, {data['dtype']}, behind {points[0]['prefix']} positions, weights out of "
        "the cache. Milliseconds by rows, and those of reading weights and cache:",
        markdown(["", *map(str, counts)], lines),
    ]
    if (folder / "pair.json").exists():
        pair = _read(folder, "pair")["points"]
        operator, modules = (1e3 * pair[f"plain {way}"]["graphs"][0]["replay_seconds"] for way in WAYS)
        equal = pair["graph modules"]["text"] == pair["graph modules"]["again"]
        parts.append(
            f"A whole captured step of plain decoding with the 8B shape: {operator:.2f} ms by the operator, "
            f"{modules:.2f} by modules with our attention. By the operator, texts of plain and of drafted captured "
            f"steps are equal; by modules, two equal calls wrote {'one text' if equal else 'two texts'}."
        )
    return "\n\n".join(parts)


def _milliseconds(seconds: dict[int, float], counts: Sequence[int]) -> list[str]:
    return [f"{1e3 * seconds[rows]:.2f}" if rows in seconds else "–" for rows in counts]
