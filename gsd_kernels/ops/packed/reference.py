"""The formats' definitions. q: code; d, m: scale and minimum of a block, or of a part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import halves
from .matrix import PackedMatrix

IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of a normal distribution (arXiv 2305.14314); these and FP4 as bitsandbytes has them."""
FP4 = tuple(sign * value / 12 for sign in (1, -1) for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))


def unpack_rows(matrix: PackedMatrix, rows: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of the dense matrix that a packed one stands for: each weight in float32, rounded once.

    Formats of GGUF: ``dequantize`` of the ``gguf`` package gives the same bits.

    Args:
        matrix: packed.
        rows: int64 [n], which ones, in their order; ``None``: all.
        dtype: float32, bfloat16 or float16.

    Returns:
        [n, inputs]
    """
    data, scales, kind = matrix.data, matrix.scales, matrix.kind
    if rows is not None:
        data, scales = data[rows], None if scales is None else scales[rows]
    if scales is not None:
        codes = data if kind.weights == 1 else halves.split(data, high_first=kind.high_first)
        groups = scales.shape[1]
        wide = GROUPS[kind.name](codes.unflatten(1, (groups, -1)), scales.view(len(data), groups, 1, -1))
    else:
        wide = BLOCKS[kind.name](data.unflatten(1, (-1, kind.bytes)))  # [n, blocks, weights]
    return wide.flatten(1).to(dtype)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte ``at`` of every block, float32 [n, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(blocks: Tensor, at: int) -> Tensor:
    """32 codes in the sixteen bytes from ``at``: low nibbles, then high ones."""
    codes = blocks[..., at : at + 16].int()
    return torch.cat([codes & 15, codes >> 4], -1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """32 bits of the four bytes from ``at``, as 0 or 16."""
    shifts = torch.arange(8, dtype=torch.int32, device=blocks.device)
    return ((blocks[..., at : at + 4, None].int() >> shifts) & 1).flatten(-2) << 4


def _value(values: Sequence[float], codes: Tensor) -> Tensor:
    """The values that codes stand for, float32."""
    return torch.tensor(values, dtype=torch.float32, device=codes.device)[codes]


def q4_0(blocks: Tensor) -> Tensor:
    """d (q − 8)"""
    return (_nibbles(blocks, 2) - 8) * _half(blocks, 0)


def q4_1(blocks: Tensor) -> Tensor:
    """d q + m"""
    return _nibbles(blocks, 4) * _half(blocks, 0) + _half(blocks, 2)


def q5_0(blocks: Tensor) -> Tensor:
    """d (q − 16)"""
    return ((_nibbles(blocks, 6) | _fifth_bits(blocks, 2)) - 16) * _half(blocks, 0)


def q5_1(blocks: Tensor) -> Tensor:
    """d q + m"""
    return (_nibbles(blocks, 8) | _fifth_bits(blocks, 4)) * _half(blocks, 0) + _half(blocks, 2)


def q8_0(blocks: Tensor) -> Tensor:
    """d q"""
    return blocks[..., 2:].view(torch.int8) * _half(blocks, 0)


def iq4_nl(blocks: Tensor) -> Tensor:
    """d values[q]"""
    return _value(IQ4_NL, _nibbles(blocks, 2)) * _half(blocks, 0)


def mxfp4(blocks: Tensor) -> Tensor:
    """2^(e − 127) values[q]"""
    scale = torch.ldexp(torch.ones_like(blocks[..., :1], dtype=torch.float32), blocks[..., :1].int() - 127)
    return _value(MXFP4, _nibbles(blocks, 1)) * scale


def _six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """d and m of the eight parts of a block of 256, float32 [n, blocks, 8] each."""
    s = blocks[..., 4:16].int()
    low, high, rest = s[..., :4], s[..., 4:8], s[..., 8:]
    scale = torch.cat([low & 63, rest & 15 | low >> 6 << 4], -1)
    minimum = torch.cat([high & 63, rest >> 4 | high >> 6 << 4], -1)
    return scale * _half(blocks, 0), minimum * _half(blocks, 2)


def _parts(blocks: Tensor, at: int) -> Tensor:
    """256 codes in the 128 bytes from ``at``, [n, blocks, 8, 32]: low nibbles of 32 bytes, then their high ones."""
    codes = blocks[..., at : at + 128].int().unflatten(-1, (4, 1, 32))
    return torch.cat([codes & 15, codes >> 4], -2).flatten(-3, -2)


def q4_k(blocks: Tensor) -> Tensor:
    """d q − m"""
    d, m = _six_bits(blocks)
    return (_parts(blocks, 16) * d[..., None] - m[..., None]).flatten(-2)


def q5_k(blocks: Tensor) -> Tensor:
    """d q − m, where bit j of byte i is the fifth of part j's code i"""
    d, m = _six_bits(blocks)
    fifth = blocks[..., None, 16:48].int() >> torch.arange(8, dtype=torch.int32, device=blocks.device)[:, None] & 1
    return ((_parts(blocks, 48) | fifth << 4) * d[..., None] - m[..., None]).flatten(-2)


def q6_k(blocks: Tensor) -> Tensor:
    """d (q − 32), a scale for sixteen weights; two halves of 128"""
    low = blocks[..., :128].int().unflatten(-1, (2, 2, 32))  # [n, blocks, half, 2, 32]
    low = torch.cat([low & 15, low >> 4], -2)  # [n, blocks, half, 4, 32]
    high = (
        blocks[..., 128:192].int().unflatten(-1, (2, 1, 32))
        >> torch.arange(0, 8, 2, dtype=torch.int32, device=blocks.device)[:, None]
        & 3
    )
    d = blocks[..., 192:208].view(torch.int8) * _half(blocks, 208)  # [n, blocks, 16]
    return (((low | high << 4) - 32).flatten(-3).unflatten(-1, (16, 16)) * d[..., None]).flatten(-2)


def int8(q: Tensor, beside: Tensor) -> Tensor:
    """d q"""
    return q.float() * beside[..., 0]


def int8_vectorwise(q: Tensor, beside: Tensor) -> Tensor:
    """m q / 127; of bitsandbytes 0.50: int8_vectorwise_dequant"""
    return q.float() * beside[..., 0] * 7.874015718698502e-3


def int4(q: Tensor, beside: Tensor) -> Tensor:
    """d (q − z); with codes of a byte too"""
    return (q.float() - beside[..., 1]) * beside[..., 0]


def int4_offset(q: Tensor, beside: Tensor) -> Tensor:
    """d (q − 8) + m"""
    return (q.float() - 8) * beside[..., 0] + beside[..., 1]


def nf4(q: Tensor, beside: Tensor) -> Tensor:
    """d values[q]"""
    return _value(NF4, q.int()) * beside[..., 0]


def fp4(q: Tensor, beside: Tensor) -> Tensor:
    """d values[q]"""
    return _value(FP4, q.int()) * beside[..., 0]


GROUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "int8": int8,
    "int8_dynamic": int8,
    "int8_rounded": int8,
    "int8_vectorwise": int8_vectorwise,
    "uint8": int4,
    "int4": int4,
    "int4_offset": int4_offset,
    "nf4": nf4,
    "fp4": fp4,
}
"""Codes [n, groups, inputs / groups] and the numbers beside them [n, groups, 1, 1 or 2] → weights, as the codes."""
BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f for f in (q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, mxfp4, q4_k, q5_k, q6_k)
}
