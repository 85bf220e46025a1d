"""The options of a server, read before anything slow is imported or loaded: its port, who may ask, how much."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
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


LOOPBACK = ("localhost", "127.0.0.1", "::1")


def bind(host: str, port: int) -> socket.socket:
    """Open the port; 0 takes a free one.

    Raises:
        OSError: it cannot be opened; the message names the option.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        known = not isinstance(error, socket.gaierror) and error.errno is not None
        reason = os.strerror(error.errno).lower() if known else str(error.strerror or error).lower()
        raise OSError(f"--host, --port: {host}:{port} cannot be opened: {reason}; choose another") from error


def names_of(host: str, allowed: Sequence[str]) -> list[str] | None:
    """Names that requests may call a server by which listens at ``host``; ``None``: any.

    Those of the loopback address, and what is allowed; any where others' networks reach it and nothing is allowed.
    """
    if not allowed and not is_loopback(host):
        return None
    return [*LOOPBACK, name_of(host), *allowed]


def name_of(host: str) -> str:
    """The name or address in ``name``, ``name:port``, ``[address]:port`` or an address of IPv6, as it is compared."""
    if host.startswith("["):
        host = host.partition("]")[0][1:]
    elif host.count(":") < 2:
        host = host.partition(":")[0]
    return host.lower().removesuffix(".")


def host_names(given: list[str] | None) -> list[str]:
    """``--allowed-host``: names as requests are compared with.

    Raises:
        ValueError: one could never match.
    """
    names = []
    for host in given or ():
        names.append(name := name_of(host.strip()))
        if not name or any(mark in host for mark in "/@") or (name != "*" and "*" in name):
            raise ValueError(f"--allowed-host: expected a name such as box.local, an address, or *, got {host!r}")
    return names


def origins_of(given: list[str] | None) -> list[str]:
    """``--cors``: origins as browsers send them.

    Raises:
        ValueError: one could never match.
    """
    origins = []
    for origin in given or ():
        scheme, mark, rest = origin.strip().lower().removesuffix("/").partition("://")
        if not (scheme in ("*", "null") and not mark) and (not scheme or not rest or any(c in rest for c in "/?#*@ ")):
            raise ValueError(f"--cors: expected an origin such as http://localhost:3000, or *, got {origin!r}")
        usual = {"http": ":80", "https": ":443"}.get(scheme, "/")
        origins.append(scheme + mark + rest.removesuffix(usual))
    return origins


def is_loopback(host: str) -> bool:
    """Return whether this machine alone reaches the address."""
    return host in ("localhost", "::1") or host.startswith("127.")


def check_installed() -> None:
    """Check the extra's packages and versions before a model is loaded.

    Raises:
        ImportError: something is missing or too old; the message names it and the cure.
    """
    from transformers.utils.versions import require_version

    from gsd_kernels_hf.extras import cure, packages

    for needed in packages("serving"):
        try:
            require_version(needed)
        except (ImportError, PackageNotFoundError) as error:
            raise ImportError(f"serve: {' '.join(str(error).split())}: {cure('serving', '--upgrade')}") from error
