"""The rows that compiled ops on tensor cores take, and the words for others."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128)
MIN_CAPABILITY = (8, 0)
ALIGNMENT = 16  # bytes of one asynchronous copy
OTHERWISE = "; use backend='reference'"


def expects(name: str, expected: str) -> str:
    """The message of an error, with the cure."""
    return f"{name}: backend 'cuda' expects {expected}{OTHERWISE}".replace("torch.", "")


def check_device(device: torch.device) -> None:
    """Raise for a GPU that cannot run them; other devices are not looked at.

    Raises:
        ValueError: it is too old.
    """
    if device.type == "cuda" and (got := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        raise ValueError(expects(str(device), f"a GPU of compute capability 8.0 or newer, got {got[0]}.{got[1]}"))


def check_type(name: str, dtype: torch.dtype, head_dim: int) -> None:
    """Raise for a dtype, which is that of the tensor of this name, or a head size that they have no code for.

    Raises:
        TypeError, ValueError: the one or the other.
    """
    if dtype not in DTYPES:
        raise TypeError(expects(name, f"float16 or bfloat16, got {dtype}"))
    if head_dim not in HEAD_DIMS:
        raise ValueError(expects("q", f"heads of 64 or 128, got {head_dim}"))


def check_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise for a tensor of another dtype than the first one."""
    if tensor.dtype != dtype:
        raise TypeError(expects(name, f"{dtype} like the others, got {tensor.dtype}"))


def check_rows(name: str, rows: Tensor, dtype: torch.dtype) -> None:
    """Raise for rows [B, H, R, D], of a cache for example, of another dtype, or that cannot be copied.

    Raises:
        TypeError, ValueError: a dtype, a place or a stride.
    """
    check_dtype(name, rows, dtype)
    strides = [stride for stride, size in zip(rows.stride()[:3], rows.shape, strict=False) if size > 1]
    offsets = [rows.storage_offset(), *strides]  # allocations are aligned
    if rows.stride(3) != 1 or any(offset * rows.element_size() % ALIGNMENT for offset in offsets):
        expected = f"rows at multiples of {ALIGNMENT} bytes"
        raise ValueError(expects(name, f"{expected}, got strides {list(rows.stride())} from place {offsets[0]}"))
