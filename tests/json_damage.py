"""JSON values with one thing wrong."""

from __future__ import annotations

import copy
from typing import Any


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to everything inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, child in inner for found in leaves(child, (*path, key)))]


def replaced(value: Any, way: tuple[Any, ...], by: Any) -> Any:
    """A copy with something else at the end of a way."""
    if not way:
        return by
    made = inside = copy.deepcopy(value)
    for key in way[:-1]:
        inside = inside[key]
    inside[way[-1]] = by
    return made
