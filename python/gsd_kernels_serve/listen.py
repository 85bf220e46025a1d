"""The port of the server, opened before anything slow is imported or loaded."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

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
    return [*LOOPBACK, host, *allowed]


def is_loopback(host: str) -> bool:
    """Return whether this machine alone reaches the address."""
    return host in ("localhost", "::1") or host.startswith("127.")
