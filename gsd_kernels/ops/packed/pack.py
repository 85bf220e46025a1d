"""Dense matrices packed by round to nearest, as GGUF's reference packs them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .kinds import BY_NAME
from .matrix import PackedMatrix

AT_ONCE = 1 << 22  # weights in float64


def pack_matrix(dense: Tensor, kind: str) -> PackedMatrix:
    """A matrix packed; its weights are rounded, so it stands for another matrix than ``dense``.

    ``quantize`` of the ``gguf`` package gives the same bytes.

    Args:
        dense: float32, bfloat16 or float16 [outputs, inputs].
        kind: one of :data:`PACKERS`.

    Raises:
        TypeError, ValueError: another kind, or rows that are no whole number of its blocks.
    """
    if kind not in PACKERS:
        raise ValueError(f"kind: expected one of {', '.join(PACKERS)}, got {kind!r}")
    of, (outputs, inputs) = BY_NAME[kind], dense.shape
    data = torch.empty(outputs, of.row_bytes(inputs), dtype=torch.uint8, device=dense.device)
    rows = max(1, AT_ONCE // inputs)
    for begin in range(0, outputs, rows):
        blocks = dense[begin : begin + rows].detach().float().unflatten(1, (-1, of.weights))  # [n, blocks, 32]
        data[begin : begin + rows] = PACKERS[kind](blocks).flatten(1)
    return PackedMatrix(of, data, inputs)


def q8_0(x: Tensor) -> Tensor:
    d = x.abs().amax(-1, keepdim=True) / 127
    code = x * _inverse(d)
    rounded = code.abs().floor() + (2 * (code.abs() - code.abs().floor())).floor()  # halves go away from 0
    return torch.cat([_half(d), (rounded * code.sign()).to(torch.int8).view(torch.uint8)], -1)


def q4_0(x: Tensor) -> Tensor:
    d, codes = _around_zero(x, 8)
    return torch.cat([_half(d), _nibbles(codes)], -1)


def q5_0(x: Tensor) -> Tensor:
    d, codes = _around_zero(x, 16)
    return torch.cat([_half(d), _fifth_bits(codes), _nibbles(codes)], -1)


def q4_1(x: Tensor) -> Tensor:
    d, least, codes = _from_least(x, 15)
    return torch.cat([_half(d), _half(least), _nibbles(codes)], -1)


def q5_1(x: Tensor) -> Tensor:
    d, least, codes = _from_least(x, 31)
    return torch.cat([_half(d), _half(least), _fifth_bits(codes), _nibbles(codes)], -1)


def _around_zero(x: Tensor, middle: int) -> tuple[Tensor, Tensor]:
    """Scale and codes, 0 standing for the largest weight by magnitude."""
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    d = largest / -middle
    codes = (x.double() * _inverse(d).double() + (middle + 0.5)).trunc().clamp(0, 2 * middle - 1)
    return d, codes.to(torch.uint8)


def _from_least(x: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, least weight and codes above it."""
    least = x.amin(-1, keepdim=True)
    d = (x.amax(-1, keepdim=True) - least) / most
    codes = ((x - least) * _inverse(d) + 0.5).trunc().clamp(0, most)
    return d, least, codes.to(torch.uint8)


def _inverse(d: Tensor) -> Tensor:
    return torch.where(d == 0, 0.0, 1 / d)


def _half(value: Tensor) -> Tensor:
    return value.half().view(torch.uint8)


def _nibbles(codes: Tensor) -> Tensor:
    return (codes[..., :16] & 15) | (codes[..., 16:] << 4)


def _fifth_bits(codes: Tensor) -> Tensor:
    bits = (codes >> 4).unflatten(-1, (4, 8)) << torch.arange(8, dtype=torch.uint8, device=codes.device)
    return bits.sum(-1, dtype=torch.uint8)


PACKERS: dict[str, Callable[[Tensor], Tensor]] = {f.__name__: f for f in (q8_0, q5_1, q5_0, q4_1, q4_0)}
"""By names of kinds: blocks float32 [n, blocks, 32] → uint8 [n, blocks, bytes of a block]."""
