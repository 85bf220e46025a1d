"""Codes of half a byte, of which two share a byte."""

from __future__ import annotations

import torch
from torch import Tensor


def split(data: Tensor, *, high_first: bool = False) -> Tensor:
    """Codes of bytes, uint8 […, n] → […, 2 n]: of each byte that in its low half first, or that in its high half."""
    low, high = data & 15, data >> 4
    return torch.stack([high, low] if high_first else [low, high], -1).flatten(-2)


def join(codes: Tensor, *, high_first: bool = False) -> Tensor:
    """Bytes of codes: what :func:`split` takes apart, contiguous."""
    first, second = codes[..., ::2], codes[..., 1::2]
    return (first << 4 | second if high_first else first | second << 4).contiguous()
