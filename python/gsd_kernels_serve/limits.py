"""Bounds of a server by option, so that no request holds or fills it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

READ_SECONDS = 30.0
"""Seconds in which a client sends the body of a request."""


def _option(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel="Limits of requests", **more)


@dataclass(frozen=True)
class Limits:
    """Bounds of all requests, options of the command; those of single fields are in the table of fields.

    Attributes:
        body: bytes of a request, and characters of a chat that its template has written.
        prompt: tokens of a prompt; ``None``: twice the model's positions, or 131,072 where it does not say.
        seconds: for reading a request: its template, its tokens, its schema.
        requests: that are under way; more are sent away.
    """

    body: Annotated[int, _option("--max-body", "Of a request.", min=1, metavar="BYTES")] = 2_000_000
    prompt: Annotated[
        int | None,
        _option(
            "--max-prompt",
            "Of a prompt; default: twice the model's positions.",
            min=1,
            metavar="TOKENS",
            show_default=False,
        ),
    ] = None
    seconds: Annotated[float, _option("--max-seconds", "For its template, its tokens and its schema.", min=0.1)] = 10.0
    requests: Annotated[int, _option("--max-requests", "Under way at a time.", min=1)] = 128

    def tokens(self, positions: int | None) -> int:
        """Of a prompt of a model with so many positions."""
        return self.prompt or (131_072 if positions is None else 2 * positions)
