"""Argument checks shared by the ops. Host-side metadata only: nothing here waits for a device."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_tensor(
    name: str, value: object, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Raise unless ``value`` is a tensor of ``shape`` (``None`` = any size), one of ``dtypes``, on ``device``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    size = value.shape
    if size != shape and not _fits(size, shape):  # hundreds of these a step: compared at once where all is given
        expected = "[" + ", ".join("*" if s is None else str(s) for s in shape) + "]"
        raise ValueError(f"{name}: expected shape {expected}, got {list(size)}")
    if value.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name}: expected {names}, got {str(value.dtype).removeprefix('torch.')}")
    if value.device != device:
        raise ValueError(f"{name}: expected device {device}, got {value.device}: move it with .to()")


def _fits(size: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    if len(size) != len(shape):
        return False
    for got, expected in zip(size, shape, strict=True):  # noqa: SIM110 (a generator costs more)
        if expected is not None and got != expected:
            return False
    return True
