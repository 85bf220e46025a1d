"""In which pieces a prompt is read."""

from __future__ import annotations

from collections.abc import Iterator

WHOLE_TOKENS = 2**31
"""Least size of pieces of prompts that are read in one: layers begin with no state at every piece, as Jamba's do."""
SEVERAL_TOKENS = 2
"""Where one token alone is read by other rules than a prompt, as Zamba 2's."""


def pieces(begin: int, end: int, most: int | None, least: int = 1) -> Iterator[tuple[int, int]]:
    """Begin and end of pieces of at most ``most`` tokens, ``None``: all; of ``least`` or more behind the first."""
    size = max(most or WHOLE_TOKENS, least)
    while begin < end:
        border = begin + size
        if end - border < least:
            border = end
        yield begin, border
        begin = border
