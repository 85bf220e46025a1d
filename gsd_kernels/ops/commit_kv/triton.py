"""Moving accepted rows to the end of the prefix: one launch for all layers that lie evenly spaced in memory."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

TILE = 8192  # elements that one program holds between reading and writing


@triton.jit(do_not_specialize=["slots", "width"])
def _commit_kernel(
    k_ptr,  # the first layer's caches [B, H, S, D]
    v_ptr,
    accepted_rows_ptr,  # int32 [B, width]
    num_accepted_ptr,
    kv_len_ptr,
    k_step,  # elements from one layer to the next
    v_step,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    v_stride_b,
    v_stride_h,
    v_stride_s,
    heads,
    slots,
    width,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per layer, cache head and stretch of dimensions, for K and V. It reads all it will write first."""
    b = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    layer = tl.program_id(1).to(tl.int64)
    half = tl.num_programs(2) // 2
    is_v = tl.program_id(2) >= half
    i = tl.arange(0, BLOCK_P)
    d = (tl.program_id(2) % half) * BLOCK_D + tl.arange(0, BLOCK_D)
    kv_len = tl.load(kv_len_ptr + b).to(tl.int64)
    row = tl.load(accepted_rows_ptr + b * width + i, mask=i < width, other=0)
    row = tl.maximum(row, 0)
    moves = (i < tl.minimum(tl.load(num_accepted_ptr + b), width)) & (row != i)  # a row in its place stays
    # As does one whose source or place is no slot.
    moves = moves & (kv_len + tl.minimum(row, i) >= 0) & (kv_len + tl.maximum(row, i) < slots)
    if is_v:
        base = v_ptr + layer * v_step + b.to(tl.int64) * v_stride_b + head.to(tl.int64) * v_stride_h
        stride = v_stride_s
        dim = V_DIM
    else:
        base = k_ptr + layer * k_step + b.to(tl.int64) * k_stride_b + head.to(tl.int64) * k_stride_h
        stride = k_stride_s
        dim = K_DIM
    base += kv_len * stride
    mask = moves[:, None] & (d < dim)[None, :]
    values = tl.load(base + row[:, None] * stride + d[None, :], mask=mask)
    tl.debug_barrier()
    tl.store(base + i[:, None] * stride + d[None, :], values, mask=mask)


def commit_kv(
    k_caches: Sequence[Tensor],
    v_caches: Sequence[Tensor],
    accepted_rows: Tensor,  # int32 [B, P]
    num_accepted: Tensor,
    kv_len: Tensor,
) -> None:
    """One launch a run of evenly spaced layers (one in all for a stacked cache), and one to advance ``kv_len``."""
    width = accepted_rows.shape[1]
    block_p = max(16, triton.next_power_of_2(width))
    accepted_rows = accepted_rows.contiguous()
    start = 0
    while start < len(k_caches):
        k, v = k_caches[start], v_caches[start]
        layers, k_step, v_step = even_run(k_caches[start:], v_caches[start:])
        batch, heads, slots, k_dim = k.shape
        v_dim = v.shape[3]
        dim = max(k_dim, v_dim)
        block_d = min(triton.next_power_of_2(dim), max(16, TILE // block_p))
        if batch * heads:
            _commit_kernel[(batch * heads, layers, 2 * triton.cdiv(dim, block_d))](
                k,
                v,
                accepted_rows,
                num_accepted,
                kv_len,
                k_step,
                v_step,
                *k.stride()[:3],
                *v.stride()[:3],
                heads,
                slots,
                width,
                K_DIM=k_dim,
                V_DIM=v_dim,
                BLOCK_P=block_p,
                BLOCK_D=block_d,
                num_warps=4,
            )
        start += layers
    kv_len.add_(num_accepted)


def even_run(k_caches: Sequence[Tensor], v_caches: Sequence[Tensor]) -> tuple[int, int, int]:
    """How many of the first layers have one shape and lie evenly spaced, and their steps in elements of k and v."""
    first = (k_caches[0], v_caches[0])
    steps: tuple[int, ...] = (0, 0)
    for layer in range(1, len(k_caches)):
        now = (k_caches[layer], v_caches[layer])
        alike = all(
            a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
            for a, b in zip(first, now, strict=True)
        )
        offsets = [b.data_ptr() - a.data_ptr() for a, b in zip(first, now, strict=True)]
        sizes = [a.element_size() for a in first]
        if layer == 1:
            if not alike or any(o % s for o, s in zip(offsets, sizes, strict=True)):
                return 1, 0, 0
            steps = tuple(o // s for o, s in zip(offsets, sizes, strict=True))
        elif not alike or any(o != layer * t * s for o, t, s in zip(offsets, steps, sizes, strict=True)):
            return layer, steps[0], steps[1]
    return len(k_caches), steps[0], steps[1]
