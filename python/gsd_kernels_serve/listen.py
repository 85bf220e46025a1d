"""The port of the server, opened before anything slow is imported or loaded."""

from __future__ import annotations

import os
import socket


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


def is_loopback(host: str) -> bool:
    """Whether this machine alone reaches the address."""
    return host in ("localhost", "::1") or host.startswith("127.")
