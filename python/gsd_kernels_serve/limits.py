"""The options of a server, read before anything slow is imported or loaded: its port, who may ask, how much."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from typing import Annotated

from gsd_kernels_cli.options import option

READ_SECONDS = 30.0
"""Seconds in which a client sends the body of a request."""


_PANEL = "Limits of requests"


@dataclass(frozen=True)
class Limits:
    """Bounds of all requests, options of the command; those of single fields are in the table of fields.

    Attributes:
        body: bytes of a request, and characters of a chat that its template has written.
        prompt: tokens of a prompt; ``None``: twice the model's positions, or 131,072 where it does not say.
        seconds: for reading a request: its template, its tokens, its schema.
        requests: that are under way; more are sent away.
    """

    body: Annotated[int, option(_PANEL, "Of a request.", "--max-body", min=1, metavar="BYTES")] = 2_000_000
    prompt: Annotated[
        int | None,
        option(
            _PANEL,
            "Of a prompt; default: twice the model's positions.",
            "--max-prompt",
            min=1,
            metavar="TOKENS",
            show_default=False,
        ),
    ] = None
    seconds: Annotated[
        float, option(_PANEL, "For its template, its tokens and its schema.", "--max-seconds", min=0.1)
    ] = 10.0
    requests: Annotated[int, option(_PANEL, "Under way at a time.", "--max-requests", min=1)] = 128


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


def name_of(host: str) -> str:
    """The name or address in ``name``, ``name:port``, ``[address]:port`` or an address of IPv6, as it is compared."""
    if host.startswith("["):
        host = host.partition("]")[0][1:]
    elif host.count(":") < 2:
        host = host.partition(":")[0]
    return host.lower().removesuffix(".")


def hosts_of(host: str, given: list[str] | None) -> list[str] | None:
    """Names that requests may call a server by which listens at ``host``; ``None``: any.

    Those of the loopback address, and ``--allowed-host``; any where others' networks reach it and nothing is allowed.

    Raises:
        ValueError: one could never match.
    """
    names = []
    for allowed in given or ():
        names.append(name := name_of(allowed.strip()))
        if not name or any(mark in allowed for mark in "/@") or (name != "*" and "*" in name):
            raise ValueError(f"--allowed-host: expected a name such as box.local, an address, or *, got {allowed!r}")
    return [*LOOPBACK, name_of(host), *names] if names or is_loopback(host) else None


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
    return host in LOOPBACK or host.startswith("127.")


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
