"""Numbers of a file that anybody may have written: of one kind, finite and within bounds, or an error.

Proofs of a GPU are read by these alone.
"""

from __future__ import annotations

from typing import Any

MAX_COUNT = 1 << 53  # of steps: what a float still tells apart


def number(name: str, value: Any, least: float, most: float) -> float:
    """A number from ``least`` to ``most``.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name}: expected a number from {least:g} to {most:g}, got {_shown(value)}")
    return float(value)


def count(name: str, value: Any, least: int = 0, most: int = MAX_COUNT) -> int:
    """A whole number from ``least`` to ``most``.

    Raises:
        ValueError: it is none.
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}: expected a whole number from {least} to {most}, got {_shown(value)}")
    return value


def table(name: str, value: Any, kind: type) -> dict[str, Any]:
    """An object of JSON whose values are of a kind.

    Raises:
        ValueError: it is none.
    """
    if type(value) is not dict or not all(type(inner) is kind for inner in value.values()):
        raise ValueError(f"{name}: expected a table of {kind.__name__}, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    """The beginning of a value; of an integer of thousands of digits its size, which is quicker."""
    if type(value) is int and value.bit_length() > 64:
        return f"one of {value.bit_length()} bits"
    text = repr(value) if not isinstance(value, (list, dict)) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:40]}…"
