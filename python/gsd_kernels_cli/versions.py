"""Installed versions."""

from __future__ import annotations

import platform
from importlib import metadata

import gsd_kernels


def versions() -> dict[str, str | None]:
    """Versions of Python and the packages that decide results; ``None`` for what is missing."""
    known: dict[str, str | None] = {"python": platform.python_version(), "gsd_kernels": gsd_kernels.__version__}
    for package in ("torch", "transformers", "triton"):
        try:
            known[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            known[package] = None
    return known
