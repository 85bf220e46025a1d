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
