"""Fewer cases than a product has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def rotated(first: Iterable[Any], second: Sequence[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every pair of the first two, beside which values of the others come in turn, so that these meet both."""
    return [
        (a, b, *(other[(i + k * j) % len(other)] for k, other in enumerate(others, 1)))
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]
