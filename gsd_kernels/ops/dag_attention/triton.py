"""Split-KV attention of graph rows, for tensor cores.

The cache is cut along its positions: prefix splits cover ``kv_start … kv_len − 1`` and need no ancestor bits, graph
splits cover the node slots and start at ``kv_len``, so that one mask word serves 32 columns of a tile. Every split
writes a normalised partial output and its log-sum-exp; a second kernel combines them. ``docs/how-it-works.md`` has the
derivation and the reasons.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention_config import AttentionConfig, attention_config
from ...graph import WORD_BITS
from ..triton_common import current_arch, interpreting
from .triton_split import (
    EMPTY,
    attend_nodes,
    attend_prefix,
    first_position,
    load_queries,
    nothing_seen,
    oldest_position,
    query_rows,
    split_span,
    store_partial,
)

LOG2_E = 1.4426950408889634
NODES_PER_SPLIT = 256
MIN_BLOCKS = 4  # a prefix split shorter than this costs more to combine than it gains
MAX_HEAD_DIM = 256
COMBINE_ELEMENTS = 8192  # partial outputs that one combining program holds in registers


@triton.jit
def _split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,  # int32 [B, R, num_words]
    kv_len_ptr,
    kv_start_ptr,  # None: 0
    row_depths_ptr,  # int32 [B, R], contiguous; None without a sliding window or chunks
    node_depths_ptr,  # int32 [B, node_depths_stride]
    partial_out_ptr,  # float32 [B, Hkv, splits, M, VALUE_DIM]
    partial_lse_ptr,  # float32 [B, Hkv, splits, M], base 2
    q_stride_b,
    q_stride_h,
    q_stride_r,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    v_stride_b,
    v_stride_h,
    v_stride_s,
    mask_stride_b,
    mask_stride_r,
    node_depths_stride,
    rows,
    num_words,
    capacity,
    qk_scale,
    softcap,
    window,  # or a chunk's size
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per cache head; M = GROUP · rows query vectors share one tile of K and V
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PREFIX_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_NODES: tl.constexpr,
    SPLIT_MIN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,  # the window begins at a multiple of its size
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One split of one block of query vectors of one head."""
    m, row, in_m, size_m = query_rows(rows, GROUP, BLOCK_M)
    batch, head, split = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS, tl.program_id(2)
    kv_len = tl.load(kv_len_ptr + batch)
    first = first_position(kv_start_ptr, batch)
    oldest = oldest_position(row_depths_ptr, batch, rows, row, in_m, kv_len - first, window, HAS_WINDOW, CHUNKED)
    start, end = split_span(
        first, split, kv_len, num_words, capacity, window,
        BLOCK_N, PREFIX_SPLITS, SPLIT_NODES, SPLIT_MIN, HAS_WINDOW, CHUNKED,
    )  # fmt: skip
    out_row = (tl.program_id(1) * SPLITS + split).to(tl.int64) * size_m + m
    if start >= end:  # nothing here: 4 bytes a row, no output traffic
        tl.store(partial_lse_ptr + out_row, tl.full([BLOCK_M], EMPTY, tl.float32), mask=in_m)
        return
    q_head = q_ptr + batch.to(tl.int64) * q_stride_b + (head * GROUP + m // rows).to(tl.int64) * q_stride_h
    q = load_queries(q_head, row, in_m, q_stride_r, HEAD_DIM, BLOCK_D, UPCAST)
    k_head = k_ptr + batch.to(tl.int64) * k_stride_b + head.to(tl.int64) * k_stride_h
    v_head = v_ptr + batch.to(tl.int64) * v_stride_b + head.to(tl.int64) * v_stride_h
    best, total, acc = nothing_seen(BLOCK_M, BLOCK_DV)
    if split < PREFIX_SPLITS:
        best, total, acc = attend_prefix(
            q, (k_head, v_head, k_stride_s, v_stride_s), (start, end), (kv_len, oldest), (qk_scale, softcap),
            (best, total, acc), HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_N,
            HAS_SOFTCAP, HAS_WINDOW, PRECISION, UPCAST,
        )  # fmt: skip
    else:
        mask_row = mask_ptr + batch.to(tl.int64) * mask_stride_b + row * mask_stride_r  # [M]
        best, total, acc = attend_nodes(
            q, (k_head, v_head, k_stride_s, v_stride_s), (start, end), (kv_len, oldest), (qk_scale, softcap),
            (best, total, acc), (mask_row, in_m), node_depths_ptr, batch * node_depths_stride,
            HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, HAS_SOFTCAP, HAS_WINDOW, PRECISION, UPCAST,
        )  # fmt: skip
    store_partial((best, total, acc), partial_out_ptr, partial_lse_ptr, out_row, in_m, VALUE_DIM, BLOCK_DV)


@triton.jit
def _combine_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,  # float32 [B, Hq, R], natural log
    sinks_ptr,  # float [Hq] or None
    out_stride_b,
    out_stride_h,
    out_stride_r,
    rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """out = Σ_s 2^(lse_s − max) out_s / Σ_s 2^(lse_s − max), all splits of a row loaded at once: one trip to memory."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    batch = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    size_m = GROUP * rows
    in_m = m < size_m
    split = tl.arange(0, BLOCK_SPLITS)
    dv = tl.arange(0, BLOCK_DV)
    source = (tl.program_id(0) * SPLITS + split[None, :]).to(tl.int64) * size_m + m[:, None]  # [M, splits]
    lse = tl.load(partial_lse_ptr + source, mask=in_m[:, None] & (split < SPLITS)[None, :], other=EMPTY)
    nonempty = ~(lse <= EMPTY * 0.5)  # not `lse > …`: NaN has to get through
    best = tl.max(tl.where(nonempty, lse, EMPTY), 1)
    weights = tl.where(nonempty, tl.math.exp2(lse - best[:, None]), 0.0)
    total = tl.sum(weights, 1)
    parts = tl.load(
        partial_out_ptr + source[:, :, None] * VALUE_DIM + dv[None, None, :],
        mask=nonempty[:, :, None] & (dv < VALUE_DIM)[None, None, :],
        other=0.0,
    )  # [M, splits, Dv]
    some = total != 0.0
    out = tl.sum(parts * weights[:, :, None], 1) / tl.where(some, total, 1.0)[:, None]
    natural = (best + tl.math.log2(tl.where(some, total, 1.0))) * 0.6931471805599453
    q_head = head * GROUP + m // rows
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + q_head, mask=in_m, other=0.0).to(tl.float32)
        out = out / (1.0 + tl.exp(sink - natural))[:, None]  # sigmoid(natural − sink)
    target = batch.to(tl.int64) * out_stride_b + q_head * out_stride_h + (m % rows) * out_stride_r
    tl.store(
        out_ptr + target[:, None] + dv[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=in_m[:, None] & (dv < VALUE_DIM)[None, :],
    )
    lse_row = (batch * KV_HEADS * GROUP + q_head) * rows + m % rows
    tl.store(lse_ptr + lse_row, tl.where(some, natural, float("-inf")), mask=in_m)


def dag_attention(
    q: Tensor,  # [B, Hq, R, D]
    k: Tensor,  # [B, Hkv, S, D]
    v: Tensor,  # [B, Hkv, S, Dv]
    ancestor_mask: Tensor,  # int32 [B, R, words]
    kv_len: Tensor,
    kv_start: Tensor | None,
    row_depths: Tensor | None,
    node_depths: Tensor | None,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
    config: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Two launches of static shape. ``config`` overrides the shipped table (the tuner does)."""
    batch, heads, rows, head_dim = q.shape
    value_dim, windowed = v.shape[3], sliding_window is not None or chunk is not None
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError("q: backend 'triton' takes float32, float16 or bfloat16; use backend='reference' for float64")
    if max(head_dim, value_dim) > MAX_HEAD_DIM:
        raise ValueError(f"q: backend 'triton' takes head sizes up to {MAX_HEAD_DIM}")
    if config is None:
        arch, extras = current_arch(q.device), softcap is not None or windowed
        size_m = heads // k.shape[1] * rows
        config = attention_config(arch, q.element_size(), max(head_dim, value_dim), size_m, k.shape[2], extras)
    upcast = interpreting() and q.dtype == torch.bfloat16
    # Rows before heads in memory: the projection that follows attention reads it without a copy.
    out_dtype = torch.float32 if upcast else q.dtype
    out = torch.empty(batch, rows, heads, value_dim, dtype=out_dtype, device=q.device).transpose(1, 2)
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out.to(q.dtype), lse
    if windowed:
        assert row_depths is not None and node_depths is not None  # the api demands them
        row_depths, node_depths = row_depths.contiguous(), unit_stride(node_depths)
    else:
        row_depths = node_depths = None
    q, k, v, ancestor_mask = unit_stride(q), unit_stride(k), unit_stride(v), unit_stride(ancestor_mask)
    depths = (row_depths, node_depths)
    lengths = (kv_len, kv_start)
    sight = (sliding_window, chunk)
    partial = _attend_splits(q, k, v, ancestor_mask, lengths, depths, scale, softcap, sight, config, upcast)
    _combine(*partial, out, lse, None if sinks is None else sinks.contiguous())
    return out.to(q.dtype), lse


def _attend_splits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ancestor_mask: Tensor,
    lengths: tuple[Tensor, Tensor | None],  # kv_len, kv_start
    depths: tuple[Tensor | None, Tensor | None],  # of rows and nodes, where sight has a limit
    scale: float,
    softcap: float | None,
    sight: tuple[int | None, int | None],  # sliding window, chunk
    config: AttentionConfig,
    upcast: bool,
) -> tuple[Tensor, Tensor]:
    """The splits' normalised outputs and base-2 log-sum-exps: float32 [B, Hkv, splits, M, Dv], [B, Hkv, splits, M]."""
    batch, heads, rows, head_dim = q.shape
    kv_heads, capacity, value_dim = k.shape[1], k.shape[2], v.shape[3]
    group, words = heads // kv_heads, ancestor_mask.shape[2]
    size_m = group * rows
    m_blocks = triton.cdiv(size_m, config.block_m)
    graph_splits = triton.cdiv(words * WORD_BITS, NODES_PER_SPLIT)
    prefix_splits = config.prefix_splits(m_blocks * batch * kv_heads, capacity, MIN_BLOCKS, graph_splits)
    splits = prefix_splits + graph_splits
    partial_out = torch.empty(batch, kv_heads, splits, size_m, value_dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(batch, kv_heads, splits, size_m, dtype=torch.float32, device=q.device)
    node_depths = depths[1]
    _split_kernel[(m_blocks, batch * kv_heads, splits)](
        q,
        k,
        v,
        ancestor_mask,
        *lengths,
        *depths,
        partial_out,
        partial_lse,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *ancestor_mask.stride()[:2],
        0 if node_depths is None else node_depths.stride(0),
        rows,
        words,
        capacity,
        scale if softcap is not None else scale * LOG2_E,
        1.0 if softcap is None else softcap,
        next((size for size in sight if size is not None), 0),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_DV=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        PREFIX_SPLITS=prefix_splits,
        SPLITS=splits,
        SPLIT_NODES=NODES_PER_SPLIT,
        SPLIT_MIN=MIN_BLOCKS,
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=depths[0] is not None,
        CHUNKED=sight[1] is not None,
        PRECISION="ieee" if q.dtype == torch.float32 or upcast else "tf32",
        UPCAST=upcast,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return partial_out, partial_lse


def _combine(partial_out: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    """Weigh the splits into ``out`` [B, Hq, R, Dv] and ``lse`` [B, Hq, R]."""
    batch, kv_heads, splits, size_m, value_dim = partial_out.shape
    block_dv, block_splits = max(16, triton.next_power_of_2(value_dim)), triton.next_power_of_2(splits)
    block_m = max(1, min(16, COMBINE_ELEMENTS // (block_splits * block_dv)))
    _combine_kernel[(batch * kv_heads, triton.cdiv(size_m, block_m))](
        partial_out,
        partial_lse,
        out,
        lse,
        sinks,
        *out.stride()[:3],
        out.shape[2],
        KV_HEADS=kv_heads,
        GROUP=out.shape[1] // kv_heads,
        VALUE_DIM=value_dim,
        BLOCK_DV=block_dv,
        SPLITS=splits,
        BLOCK_SPLITS=block_splits,
        BLOCK_M=block_m,
        num_warps=4,
    )


def unit_stride(x: Tensor) -> Tensor:
    """``x`` itself if its last dimension is dense, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
