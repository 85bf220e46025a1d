"""Argument checks shared by the ops. Host-side metadata only: nothing here waits for a device."""

from __future__ import annotations

import functools
import re

import torch
from torch import Tensor

ARGUMENT = re.compile(r"([\w.]+)(\??) (\w+)\[([\w,]*)\]")  # name, whether it may be None, dtype, sizes
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_shapes(shapes: str, *values: object, device: torch.device | None = None, **sizes: int) -> None:
    """Raise unless every value is a tensor as ``shapes`` says: ``"frontier int32[B,W], tokens int32[B,W,K]"``.

    Args:
        shapes: of the values, in order. A letter is one size wherever it stands; ``?`` behind a name: or ``None``. A
            dtype is torch's, ``float`` (any of :data:`FLOATS`), or the name of an argument before, which has the same.
        values: the arguments.
        device: of all; that of the first where none is given.
        sizes: of letters that are known before.

    Raises:
        TypeError, ValueError: the first argument that is another, by its name.
    """
    described = [
        (v.shape, v.dtype, v.device) if isinstance(v, Tensor) else None if v is None else type(v).__name__
        for v in values
    ]
    check = _check.__wrapped__ if torch.compiler.is_compiling() else _check
    check(shapes, tuple(described), device, tuple(sizes.items()))


@functools.lru_cache(maxsize=1024)  # hundreds of these a step, most of which were seen before
def _check(
    shapes: str,
    described: tuple[tuple[torch.Size, torch.dtype, torch.device] | str | None, ...],
    device: torch.device | None,
    known: tuple[tuple[str, int], ...],
) -> None:
    """Raise by what is :func:`described <check_shapes>` of every value: a tensor, or the name of another type."""
    dtypes, sizes = {"float": FLOATS}, dict(known)
    for (name, optional, dtype, row), value in zip(ARGUMENT.findall(shapes), described, strict=True):
        if optional and value is None:
            continue
        if value is None or isinstance(value, str):
            raise TypeError(f"{name}: expected a tensor, got {value}")
        letters, (size, found, place) = re.findall(r"\w+", row), value
        expected = [sizes.setdefault(*one) for one in zip(letters, size, strict=False)]
        if len(letters) != len(size) or expected != [*size]:
            wanted = ", ".join(str(sizes.get(letter, letter)) for letter in letters)
            raise ValueError(f"{name}: expected shape [{wanted}], got {list(size)}")
        allowed = dtypes.get(dtype) or (getattr(torch, dtype),)
        if found not in allowed:
            names = " or ".join(map(str, allowed))
            raise TypeError(f"{name}: expected {names}, got {found}".replace("torch.", ""))
        dtypes[name], device = (found,), device or place
        if place != device:
            raise ValueError(f"{name}: expected device {device}, got {place}: move it with .to()")
