"""Moving accepted rows to the end of the prefix: one launch for the keys, and one for the values, of all layers that
lie evenly spaced in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile

import triton
import triton.language as tl
from torch import Tensor

TILE = 8192  # elements that one program holds between reading and writing


@triton.jit(do_not_specialize=["slots", "width"])
def _commit_kernel(
    cache_ptr,  # the first layer's [B, H, S, D]
    accepted_rows_ptr,  # int32 [B, width]
    num_accepted_ptr,
    kv_len_ptr,
    step,  # elements from one layer to the next
    stride_b,
    stride_h,
    stride_s,
    heads,
    slots,
    width,
    DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per layer, cache head and stretch of dimensions. It reads all it will write first."""
    b = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK_P)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    kv_len = tl.load(kv_len_ptr + b).to(tl.int64)
    row = tl.maximum(tl.load(accepted_rows_ptr + b * width + i, mask=i < width, other=0), 0)
    moves = (i < tl.minimum(tl.load(num_accepted_ptr + b), width)) & (row != i)  # a row in its place stays
    # As does one whose source or place is no slot.
    moves = moves & (kv_len + tl.minimum(row, i) >= 0) & (kv_len + tl.maximum(row, i) < slots)
    base = cache_ptr + layer * step + b * stride_b + head * stride_h + kv_len * stride_s
    mask = moves[:, None] & (d < DIM)[None, :]
    values = tl.load(base + row[:, None] * stride_s + d[None, :], mask=mask)
    tl.debug_barrier()
    tl.store(base + i[:, None] * stride_s + d[None, :], values, mask=mask)


def commit_kv(
    k_caches: Sequence[Tensor],
    v_caches: Sequence[Tensor],
    accepted_rows: Tensor,  # int32 [B, P]
    num_accepted: Tensor,
    kv_len: Tensor,
) -> None:
    """Two launches a run of evenly spaced layers (two in all for a stacked cache), and one to advance ``kv_len``."""
    width = accepted_rows.shape[1]
    block_p = max(16, triton.next_power_of_2(width))
    accepted_rows = accepted_rows.contiguous()
    for caches in (k_caches, v_caches):
        start = 0
        while start < len(caches):
            cache = caches[start]
            layers, step = even_run(caches[start:])
            batch, heads, slots, dim = cache.shape
            block_d = min(triton.next_power_of_2(dim), max(16, TILE // block_p))
            if batch * heads:
                _commit_kernel[(batch * heads, layers, triton.cdiv(dim, block_d))](
                    cache,
                    accepted_rows,
                    num_accepted,
                    kv_len,
                    step,
                    *cache.stride()[:3],
                    heads,
                    slots,
                    width,
                    DIM=dim,
                    BLOCK_P=block_p,
                    BLOCK_D=block_d,
                )
            start += layers
    kv_len.add_(num_accepted)


def even_run(caches: Sequence[Tensor]) -> tuple[int, int]:
    """How many of the first layers have one shape and lie evenly spaced, and the step between them in elements."""
    kinds = [(cache.shape, cache.stride(), cache.dtype) for cache in caches]
    steps = [(after.data_ptr() - cache.data_ptr()) // cache.element_size() for cache, after in pairwise(caches)]
    alike = (found == (kinds[0], steps[0]) for found in zip(kinds[1:], steps, strict=True))
    return 1 + sum(takewhile(bool, alike)), (steps or [0])[0]
