"""Who cannot take part, and why."""

from __future__ import annotations


class Missing(Exception):
    """One who is measured cannot take part; the text says why."""


def reason(error: Exception) -> str:
    """The text of :class:`Missing`; of any other error its kind and text in a line, at most 300 letters of it."""
    return str(error) if isinstance(error, Missing) else " ".join(f"{type(error).__name__}: {error}".split())[:300]
