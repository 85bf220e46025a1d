"""The instruction sets that the CPU's products of rows (:func:`gsd_kernels.ops.decoder_rows`) may use.

Every level that the processor and the system have proves itself on small products before its first use; the best of
them serves. ``GSD_KERNELS_CPU_LEVEL`` names another. Levels round differently; under one level a row's bits are the
same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from .compiled import UNAVAILABLE, library


@cache
def _library() -> ctypes.CDLL:
    """The compiled CPU ops.

    Raises:
        RuntimeError: there are none.
    """
    if UNAVAILABLE["cpu"] is not None:
        raise RuntimeError(f"cpu_levels: {UNAVAILABLE['cpu']}")
    loaded = library("cpu")
    for name in ("gsd_cpu_levels", "gsd_cpu_level", "gsd_cpu_use_level"):
        getattr(loaded, name).restype = ctypes.c_char_p
    loaded.gsd_cpu_use_level.argtypes = [ctypes.c_char_p]
    return loaded


def levels() -> dict[str, str | None]:
    """Every level, slowest first, and why it is left out; ``None`` where it is not."""
    lines = _library().gsd_cpu_levels().decode().splitlines()
    return {name: reason or None for name, _, reason in (line.partition("\t") for line in lines)}


def active() -> str:
    """The level in use.

    Raises:
        ValueError: ``GSD_KERNELS_CPU_LEVEL`` names one that is unknown or cannot run.
    """
    name: str = _library().gsd_cpu_level().decode()
    if name.startswith("\t"):
        raise ValueError(name.strip())
    return name


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Use one level in the whole process, for tests; ``amx_in_software`` runs the loops of AMX without its tiles.

    Raises:
        ValueError: it is unknown or cannot run.
    """
    before = active()
    problem = _library().gsd_cpu_use_level(name.encode()).decode()
    if problem:
        raise ValueError(f"name: {problem}")
    try:
        yield
    finally:
        _library().gsd_cpu_use_level(before.encode())
