"""Storing rows at their cache positions: one launch for keys and values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # elements a program: one 128-bit access a thread in half precision

# The bits of +inf: one less is the largest finite value, whatever is above is NaN.
INFINITY = {torch.float64: 0x7FF << 52, torch.float32: 0xFF << 23, torch.float16: 0x1F << 10, torch.bfloat16: 0xFF << 7}
INTEGER = {8: tl.int64, 4: tl.int32, 2: tl.int16}


@triton.jit
def _places(cache, x, b, head, row, position, d):
    """Pointers to rows of ``x`` and, without the dimension, to where they go in the cache."""
    cache_ptr, cache_b, cache_h, cache_s = cache
    x_ptr, x_b, x_h, x_r, x_d = x
    source = x_ptr + b * x_b + (head * x_h + row * x_r)[:, None] + (d * x_d)[None, :]
    return source, cache_ptr + b * cache_b + (head * cache_h + position * cache_s)[:, None]


@triton.jit
def _write_kernel(
    k_cache,  # pointer [B, H, S, D], strides of all dimensions but the last
    v_cache,
    k,  # pointer [B, H, R, D], strides
    v,
    positions,  # pointer int64 [B, R], strides
    spoiled_ptr,  # float32 [B, R], contiguous
    rows,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    MARKS: tl.constexpr,  # whether there is spoiled
    INTEGER: tl.constexpr,
    INFINITY: tl.constexpr,  # its bits
    LARGEST_INTEGER: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per sequence, stretch of (row, head) pairs, and K or V.

    Integer arithmetic makes the values finite: no NaN or subnormal rule of the hardware takes part.
    """
    b = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    d = tl.arange(0, BLOCK_D)
    real = i < rows * HEADS
    row = (i // HEADS).to(tl.int64)
    head = (i % HEADS).to(tl.int64)
    position = tl.load(positions[0] + b * positions[1] + row * positions[2], mask=real, other=0)
    if tl.program_id(2) == 0:
        source, target = _places(k_cache, k, b, head, row, position, d)
        dim = K_DIM
    else:
        source, target = _places(v_cache, v, b, head, row, position, d)
        dim = V_DIM
    mask = real[:, None] & (d < dim)[None, :]
    values = tl.load(source, mask=mask)
    bits = values.to(INTEGER, bitcast=True)
    magnitude = bits & LARGEST_INTEGER  # the sign is the highest bit
    finite = bits - (magnitude == INFINITY).to(INTEGER)
    finite = tl.where(magnitude > INFINITY, 0, finite)
    tl.store(target + d[None, :], finite.to(values.dtype, bitcast=True), mask=mask)
    if MARKS:
        found = tl.max((mask & (magnitude >= INFINITY)).to(tl.int32), 1) > 0
        tl.store(spoiled_ptr + b * rows + row, tl.full([BLOCK_I], float("nan"), tl.float32), mask=real & found)


def write_kv(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, positions: Tensor, spoiled: Tensor | None = None
) -> None:
    batch, heads, rows, k_dim = k.shape
    v_dim = v.shape[3]
    block_d = max(16, triton.next_power_of_2(max(k_dim, v_dim)))
    block_i = max(1, TILE // block_d)
    if k.numel() + v.numel() == 0:
        return
    _write_kernel[(triton.cdiv(rows * heads, block_i), batch, 2)](
        (k_cache, *k_cache.stride()[:3]),
        (v_cache, *v_cache.stride()[:3]),
        (k, *k.stride()),
        (v, *v.stride()),
        (positions, *positions.stride()),
        positions if spoiled is None else spoiled,
        rows,
        HEADS=heads,
        K_DIM=k_dim,
        V_DIM=v_dim,
        MARKS=spoiled is not None,
        INTEGER=INTEGER[k.element_size()],
        INFINITY=INFINITY[k.dtype],
        LARGEST_INTEGER=2 ** (8 * k.element_size() - 1) - 1,
        BLOCK_I=block_i,
        BLOCK_D=block_d,
        num_warps=4,
    )
