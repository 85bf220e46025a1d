"""While a prompt is read: between its pieces, and between layers, whoever waits for the text may end the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_asked: ContextVar[Callable[[], None] | None] = ContextVar("asked", default=None)


@contextmanager
def asking(function: Callable[[], None] | None) -> Iterator[None]:
    """Have ``function`` called by every :func:`ask` inside; it raises to end the call. ``None``: nobody is asked."""
    token = _asked.set(function)
    try:
        yield
    finally:
        _asked.reset(token)


def ask() -> None:
    """Ask whoever waits for the text of this thread."""
    if (function := _asked.get()) is not None:
        function()
