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

LOG2_E = 1.4426950408889634
NODES_PER_SPLIT = tl.constexpr(256)
MIN_BLOCKS = tl.constexpr(4)  # a prefix split shorter than this costs more to combine than it gains
MAX_HEAD_DIM = 256
COMBINE_ELEMENTS = 8192  # partial outputs that one combining program holds in registers

EMPTY = tl.constexpr(-1.0e30)
"""Base-2 log-sum-exp of nothing: finite, so that exp2(−inf − EMPTY) is 0 and never NaN."""


@triton.jit
def _tanh(x):
    """tanh in float32. The series keeps the relative error of small arguments, which 1 − 2/(1 + e^2x) loses."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    decay = tl.exp(-2.0 * tl.abs(x))
    ratio = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -ratio, ratio))


@triton.jit
def _scores(q, k, scaling, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Base-2 attention scores [M, N]; ``qk_scale`` holds log2(e) unless there is a soft cap to apply first."""
    qk_scale, softcap = scaling
    scores = tl.dot(q, k, input_precision=PRECISION) * qk_scale
    if HAS_SOFTCAP:
        scores = _tanh(scores / softcap) * (softcap * 1.4426950408889634)
    return scores


@triton.jit
def _accumulate(scores, v, best, total, acc, PRECISION: tl.constexpr):
    """One online-softmax step: invisible scores are −inf. Row-wise only, which makes rows independent bit for bit."""
    new_best = tl.maximum(best, tl.max(scores, 1))
    weights = tl.math.exp2(scores - new_best[:, None])  # [M, N]
    decay = tl.math.exp2(best - new_best)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return new_best, total, acc


@triton.jit
def _load(tile, there, in_dims, PADDED: tl.constexpr, UPCAST: tl.constexpr):
    """A tile of vectors, 0 where they are not there or, where it is PADDED, have no such dimension."""
    mask = there & in_dims if PADDED else there
    x = tl.load(tile, mask=mask, other=0.0)
    return x.to(tl.float32) if UPCAST else x  # the interpreter has no bfloat16 dot


@triton.jit
def _attend(
    q,  # [M, D]
    heads,  # pointers to K and V of the head, where positions are counted from, and their strides along positions
    span,  # start, end
    before,  # how many positions of the prefix are before the first one
    oldest,  # smallest visible position [M], counted from kv_len
    scaling,  # qk_scale, softcap
    mask_row,  # pointers to the rows' ancestor masks [M]; None for the prefix, as the last one
    in_m,
    node_depths_ptr,  # of this sequence
    nodes,  # that have a depth
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NODES: tl.constexpr,  # those that ancestor masks show; else the prefix, of which rows see all but for a window
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend to positions of the prefix, or nodes: the online softmax's best [M], total [M], acc [M, Dv]."""
    k_head, v_head, k_stride_s, v_stride_s = heads
    start, end = span
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    n = tl.arange(0, BLOCK_N)
    k_tile = n[None, :] * k_stride_s + d[:, None]  # [D, N]
    v_tile = n[:, None] * v_stride_s + dv[None, :]  # [N, Dv]
    best = tl.full([BLOCK_M], EMPTY, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if HAS_WINDOW:
        seen_from = before + tl.min(oldest, 0)  # older positions are outside every row's window: may hold NaN
    # Of nodes few iterations: prefetching would only take registers from the prefix.
    for n0 in tl.range(start, end, BLOCK_N, num_stages=1 if NODES else None):
        inside = n < end - n0
        if HAS_WINDOW and not NODES:
            inside = inside & (n >= seen_from - n0)
        k_block = k_head + tl.cast(n0, tl.int64) * k_stride_s
        v_block = v_head + tl.cast(n0, tl.int64) * v_stride_s
        k = _load(k_block + k_tile, inside[None, :], (d < HEAD_DIM)[:, None], HEAD_DIM != BLOCK_D, UPCAST)
        v = _load(v_block + v_tile, inside[:, None], (dv < VALUE_DIM)[None, :], VALUE_DIM != BLOCK_DV, UPCAST)
        sees = inside[None, :]
        if NODES:  # one mask word a row and tile
            bits = tl.load(mask_row + n0 // 32, mask=in_m, other=0)  # [M]
            sees = (((bits[:, None] >> n[None, :]) & 1) != 0) & sees
            if HAS_WINDOW:
                depth = tl.load(node_depths_ptr + n0 + n, mask=inside & (n0 + n < nodes), other=0)
                sees = sees & (depth[None, :] >= oldest[:, None])
        elif HAS_WINDOW:
            sees = sees & ((n0 - before + n)[None, :] >= oldest[:, None])
        scores = tl.where(sees, _scores(q, k, scaling, HAS_SOFTCAP, PRECISION), float("-inf"))
        if NODES:
            # 0 · NaN is NaN: values that are not finite leave the product, and spoil the rows that do see them.
            finite = tl.abs(v) < float("inf")
            v = tl.where(finite, v, 0.0)
            spoiled = tl.min(finite.to(tl.int32), 1) == 0  # [N]
            spoils = tl.max((sees & spoiled[None, :]).to(tl.int32), 1) != 0  # [M]
        best, total, acc = _accumulate(scores, v, best, total, acc, PRECISION)
        if NODES:
            total = tl.where(spoils, float("nan"), total)
    return best, total, acc


@triton.jit
def _positions_back(position, window, CHUNKED: tl.constexpr):
    """How many positions before its own a row sees; ``position`` is counted from kv_start."""
    if CHUNKED:
        rest = position % window  # has the sign of ``position``, which is negative where padding has no end yet
        return tl.where(rest < 0, rest + window, rest)
    else:
        return window - 1


@triton.jit
def _split_span(
    first,  # kv_start
    split,
    kv_len,
    num_words,
    capacity,
    window,
    BLOCK_N: tl.constexpr,
    PREFIX_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    """This split's positions, start and end, counted from the cache's begin or, for graph splits, from kv_len."""
    if HAS_WINDOW:
        # The cut of the prefix may not depend on any row's depth: the shallowest possible one (0) decides.
        first = tl.maximum(first, kv_len - _positions_back(kv_len - first, window, CHUNKED))
    if split < PREFIX_SPLITS:
        length = tl.maximum(kv_len - first, 0)
        blocks = tl.maximum(tl.cdiv(tl.cdiv(length, BLOCK_N), PREFIX_SPLITS), MIN_BLOCKS)
        start = first + split * blocks * BLOCK_N
        end = tl.minimum(start + blocks * BLOCK_N, kv_len)
    else:
        nodes = tl.minimum(num_words * 32, capacity - kv_len)
        start = (split - PREFIX_SPLITS) * NODES_PER_SPLIT
        end = tl.minimum(start + NODES_PER_SPLIT, nodes)
    return start, end


@triton.jit
def _store(best, total, acc, partial, out_row, in_m, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Store the normalised output and the base-2 log-sum-exp of a split."""
    dv = tl.arange(0, BLOCK_DV)
    nonempty = total != 0.0
    lse = tl.where(nonempty, best + tl.math.log2(tl.where(nonempty, total, 1.0)), EMPTY)
    tl.store(partial[1] + out_row, lse, mask=in_m)
    out = acc / tl.where(nonempty, total, 1.0)[:, None]
    out_tile = partial[0] + out_row[:, None] * VALUE_DIM + dv[None, :]
    tl.store(out_tile, out, mask=in_m[:, None] & (dv < VALUE_DIM)[None, :])


@triton.jit
def _split_kernel(
    q_ptr,
    kv,  # pointers: K, V
    mask_ptr,  # int32 [B, R, num_words]
    lengths,  # pointers: kv_len, kv_start (None: 0)
    depths,  # pointers: of rows int32 [B, R], of nodes [B, nodes]; None without a sliding window or chunks
    partial,  # pointers: normalised outputs float32 [B, Hkv, splits, M, VALUE_DIM], base-2 log-sum-exps, likewise
    q_strides,  # batch, head, row
    k_strides,  # batch, head, position
    v_strides,
    mask_strides,  # batch, row
    nodes,  # that have a depth
    rows,
    num_words,
    capacity,
    scaling,  # qk_scale, softcap
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
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,  # the window begins at a multiple of its size
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One split of one block of query vectors of one head."""
    # Query vectors are head-in-group major, row minor. Their blocks vary fastest: those of one head run together and
    # find its K and V in L2.
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row, size_m = m % rows, GROUP * rows
    in_m = m < size_m
    batch, head, split = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS, tl.program_id(2)
    kv_len = tl.load(lengths[0] + batch)
    first = 0
    if lengths[1] is not None:
        first = tl.load(lengths[1] + batch)
    oldest = row  # says nothing where sight has no limit
    if HAS_WINDOW:
        depth = tl.load(depths[0] + batch * rows + row, mask=in_m, other=2147483647 // 2)
        oldest = depth - _positions_back(kv_len - first + depth, window, CHUNKED)
    start, end = _split_span(
        first, split, kv_len, num_words, capacity, window,
        BLOCK_N, PREFIX_SPLITS, HAS_WINDOW, CHUNKED,
    )  # fmt: skip
    out_row = (tl.program_id(1) * SPLITS + split).to(tl.int64) * size_m + m
    if start >= end:  # nothing here: 4 bytes a row, no output traffic
        tl.store(partial[1] + out_row, tl.full([BLOCK_M], EMPTY, tl.float32), mask=in_m)
        return
    d = tl.arange(0, BLOCK_D)
    q_head = q_ptr + batch.to(tl.int64) * q_strides[0] + (head * GROUP + m // rows).to(tl.int64) * q_strides[1]
    q_tile = q_head[:, None] + row[:, None] * q_strides[2] + d[None, :]
    q = _load(q_tile, in_m[:, None], (d < HEAD_DIM)[None, :], HEAD_DIM != BLOCK_D, UPCAST)
    k_head = kv[0] + batch.to(tl.int64) * k_strides[0] + head.to(tl.int64) * k_strides[1]
    v_head = kv[1] + batch.to(tl.int64) * v_strides[0] + head.to(tl.int64) * v_strides[1]
    if split < PREFIX_SPLITS:
        best, total, acc = _attend(
            q, (k_head, v_head, k_strides[2], v_strides[2]), (start, end), kv_len, oldest, scaling, None, in_m,
            None, 0, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
            False, HAS_SOFTCAP, HAS_WINDOW, PRECISION, UPCAST,
        )  # fmt: skip
    else:
        mask_row = mask_ptr + batch.to(tl.int64) * mask_strides[0] + row * mask_strides[1]  # [M]
        k_nodes, v_nodes = k_head + kv_len.to(tl.int64) * k_strides[2], v_head + kv_len.to(tl.int64) * v_strides[2]
        node_depths_ptr = depths[1]
        if HAS_WINDOW:
            node_depths_ptr += batch * nodes
        best, total, acc = _attend(
            q, (k_nodes, v_nodes, k_strides[2], v_strides[2]), (start, end), kv_len, oldest, scaling, mask_row, in_m,
            node_depths_ptr, nodes, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_M, 32,
            True, HAS_SOFTCAP, HAS_WINDOW, PRECISION, UPCAST,
        )  # fmt: skip
    _store(best, total, acc, partial, out_row, in_m, VALUE_DIM, BLOCK_DV)


@triton.jit
def _combine_kernel(
    partial,  # of _split_kernel
    out_ptr,
    lse_ptr,  # float32 [B, Hq, R], natural log
    sinks_ptr,  # float [Hq] or None
    out_strides,  # batch, head, row
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
    lse = tl.load(partial[1] + source, mask=in_m[:, None] & (split < SPLITS)[None, :], other=EMPTY)
    nonempty = ~(lse <= EMPTY * 0.5)  # not `lse > …`: NaN has to get through
    best = tl.max(tl.where(nonempty, lse, EMPTY), 1)
    weights = tl.where(nonempty, tl.math.exp2(lse - best[:, None]), 0.0)
    total = tl.sum(weights, 1)
    parts = tl.load(
        partial[0] + source[:, :, None] * VALUE_DIM + dv[None, None, :],
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
    target = batch.to(tl.int64) * out_strides[0] + q_head * out_strides[1] + (m % rows) * out_strides[2]
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
    kv_heads, capacity, words = k.shape[1], k.shape[2], ancestor_mask.shape[2]
    group, size_m, pairs = heads // kv_heads, heads // kv_heads * rows, batch * kv_heads
    value_dim, windowed = v.shape[3], sliding_window is not None or chunk is not None
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError("q: backend 'triton' takes float32, float16 or bfloat16; use backend='reference' for float64")
    if max(head_dim, value_dim) > MAX_HEAD_DIM:
        raise ValueError(f"q: backend 'triton' takes head sizes up to {MAX_HEAD_DIM}")
    if config is None:
        arch, extras = current_arch(q.device), softcap is not None or windowed
        config = attention_config(arch, q.element_size(), max(head_dim, value_dim), size_m, capacity, extras)
    upcast = interpreting() and q.dtype == torch.bfloat16
    # Rows before heads in memory: the projection that follows attention reads it without a copy.
    out_dtype = torch.float32 if upcast else q.dtype
    out = torch.empty(batch, rows, heads, value_dim, dtype=out_dtype, device=q.device).transpose(1, 2)
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out.to(q.dtype), lse
    if windowed:
        assert row_depths is not None and node_depths is not None  # the api demands them
        row_depths, node_depths = row_depths.contiguous(), node_depths.contiguous()
    else:
        row_depths = node_depths = None
    q, k, v, ancestor_mask = unit_stride(q), unit_stride(k), unit_stride(v), unit_stride(ancestor_mask)
    block_dv = max(16, triton.next_power_of_2(value_dim))
    m_blocks = triton.cdiv(size_m, config.block_m)
    graph_splits = triton.cdiv(words * WORD_BITS, NODES_PER_SPLIT.value)
    prefix_splits = config.prefix_splits(m_blocks * pairs, capacity, MIN_BLOCKS.value, graph_splits)
    splits = prefix_splits + graph_splits
    partial_out = torch.empty(pairs, splits, size_m, value_dim, dtype=torch.float32, device=q.device)
    partial = partial_out, torch.empty(pairs, splits, size_m, dtype=torch.float32, device=q.device)
    heads_of = {"KV_HEADS": kv_heads, "GROUP": group, "VALUE_DIM": value_dim, "BLOCK_DV": block_dv, "SPLITS": splits}
    _split_kernel[(m_blocks, pairs, splits)](
        q,
        (k, v),
        ancestor_mask,
        (kv_len, kv_start),
        (row_depths, node_depths),
        partial,
        *(t.stride()[:3] for t in (q, k, v)),
        ancestor_mask.stride()[:2],
        0 if node_depths is None else node_depths.shape[1],
        rows,
        words,
        capacity,
        (scale * LOG2_E, 1.0) if softcap is None else (scale, softcap),
        sliding_window or chunk or 0,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        PREFIX_SPLITS=prefix_splits,
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=windowed,
        CHUNKED=chunk is not None,
        PRECISION="ieee" if q.dtype == torch.float32 or upcast else "tf32",
        UPCAST=upcast,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **heads_of,
    )
    _combine(partial, out, lse, sinks, heads_of)
    return out.to(q.dtype), lse


def _combine(
    partial: tuple[Tensor, Tensor], out: Tensor, lse: Tensor, sinks: Tensor | None, heads_of: dict[str, int]
) -> None:
    """Weigh the splits into ``out`` [B, Hq, R, Dv] and ``lse`` [B, Hq, R]."""
    pairs, splits, size_m = partial[1].shape
    block_splits = triton.next_power_of_2(splits)
    block_m = max(1, min(16, COMBINE_ELEMENTS // (block_splits * heads_of["BLOCK_DV"])))
    _combine_kernel[(pairs, triton.cdiv(size_m, block_m))](
        partial,
        out,
        lse,
        None if sinks is None else sinks.contiguous(),
        out.stride()[:3],
        out.shape[2],
        BLOCK_SPLITS=block_splits,
        BLOCK_M=block_m,
        num_warps=4,
        **heads_of,
    )


def unit_stride(x: Tensor) -> Tensor:
    """``x`` itself if its last dimension is dense, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
