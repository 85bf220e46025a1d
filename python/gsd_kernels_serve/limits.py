"""Bounds of a server by option, so that no request holds or fills it."""

from __future__ import annotations

from dataclasses import dataclass

READ_SECONDS = 30.0
"""Seconds in which a client sends the body of a request."""


@dataclass(frozen=True)
class Limits:
    """Bounds of all requests; those of single fields are in the table of fields.

    Attributes:
        body: bytes of a request, and characters of a chat that its template has written.
        prompt: tokens of a prompt; ``None``: twice the model's positions, or 131,072 where it does not say.
        seconds: for reading a request: its template, its tokens, its schema.
        requests: that are under way; more are sent away.
    """

    body: int = 2_000_000
    prompt: int | None = None
    seconds: float = 10.0
    requests: int = 128

    def tokens(self, positions: int | None) -> int:
        """Of a prompt of a model with so many positions."""
        return self.prompt or (131_072 if positions is None else 2 * positions)
