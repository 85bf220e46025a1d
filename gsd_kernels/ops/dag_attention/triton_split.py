"""Parts of one split of the attention of graph rows, those of ``_split_kernel``, in the order of its calls."""

from __future__ import annotations

import triton
import triton.language as tl

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
def _scores(q, k, qk_scale, softcap, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Base-2 attention scores [M, N]; ``qk_scale`` holds log2(e) unless there is a soft cap to apply first."""
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
def _widened(x, UPCAST: tl.constexpr):
    """``x``, in float32 where the interpreter needs it."""
    return x.to(tl.float32) if UPCAST else x


@triton.jit
def query_rows(rows, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """This program's query vectors [M], head-in-group major, row minor: number, row, whether there, how many in all."""
    # Blocks of M vary fastest: those of one head run together and find its K and V in L2.
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    size_m = GROUP * rows
    return m, m % rows, m < size_m, size_m


@triton.jit
def first_position(kv_start_ptr, batch):
    """Where the prefix begins behind the padding."""
    first = 0
    if kv_start_ptr is not None:
        first = tl.load(kv_start_ptr + batch)
    return first


@triton.jit
def positions_back(position, window, CHUNKED: tl.constexpr):
    """How many positions before its own a row sees; ``position`` is counted from kv_start."""
    if CHUNKED:
        rest = position % window  # has the sign of ``position``, which is negative where padding has no end yet
        return tl.where(rest < 0, rest + window, rest)
    else:
        return window - 1


@triton.jit
def oldest_position(
    row_depths_ptr, batch, rows, row, in_m, length, window, HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr
):
    """Smallest visible position of each row [M], counted from kv_len; means nothing where sight has no limit.

    ``length`` is of the prefix without padding, ``window`` a window's or a chunk's size.
    """
    if HAS_WINDOW:
        depth = tl.load(row_depths_ptr + batch * rows + row, mask=in_m, other=2147483647 // 2)
        return depth - positions_back(length + depth, window, CHUNKED)
    else:
        return row


@triton.jit
def split_span(
    first,  # kv_start
    split,
    kv_len,
    num_words,
    capacity,
    window,
    BLOCK_N: tl.constexpr,
    PREFIX_SPLITS: tl.constexpr,
    SPLIT_NODES: tl.constexpr,
    SPLIT_MIN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    """This split's positions, start and end, counted from the cache's begin or, for graph splits, from kv_len."""
    if HAS_WINDOW:
        # The cut of the prefix may not depend on any row's depth: the shallowest possible one (0) decides.
        first = tl.maximum(first, kv_len - positions_back(kv_len - first, window, CHUNKED))
    if split < PREFIX_SPLITS:
        length = tl.maximum(kv_len - first, 0)
        blocks = tl.maximum(tl.cdiv(tl.cdiv(length, BLOCK_N), PREFIX_SPLITS), SPLIT_MIN)
        start = first + split * blocks * BLOCK_N
        end = tl.minimum(start + blocks * BLOCK_N, kv_len)
    else:
        nodes = tl.minimum(num_words * 32, capacity - kv_len)
        start = (split - PREFIX_SPLITS) * SPLIT_NODES
        end = tl.minimum(start + SPLIT_NODES, nodes)
    return start, end


@triton.jit
def load_queries(q_head, row, in_m, q_stride_r, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr):
    """The query vectors [M, D] of ``q_head`` [M], pointers to the first row of each vector's head."""
    d = tl.arange(0, BLOCK_D)
    q_tile = q_head[:, None] + row[:, None] * q_stride_r + d[None, :]
    if HEAD_DIM == BLOCK_D:
        q = tl.load(q_tile, mask=in_m[:, None], other=0.0)
    else:
        q = tl.load(q_tile, mask=in_m[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    return _widened(q, UPCAST)


@triton.jit
def nothing_seen(BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """The state of the online softmax before anything: best [M], total [M], acc [M, Dv]."""
    zeros = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    return tl.full([BLOCK_M], EMPTY, tl.float32), tl.zeros([BLOCK_M], tl.float32), zeros


@triton.jit
def attend_prefix(
    q,  # [M, D]
    kv,  # pointers to K and V of the head, and their strides along positions
    span,  # start, end
    sight,  # kv_len, oldest visible position [M]
    scaling,  # qk_scale, softcap
    state,  # best [M], total [M], acc [M, Dv]
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter has no bfloat16 dot
):
    """Attend to positions of the prefix: all rows see all of them, but for a window. Returns the state after them."""
    k_head, v_head, k_stride_s, v_stride_s = kv
    start, end = span
    kv_len, oldest = sight
    qk_scale, softcap = scaling
    best, total, acc = state
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    n = tl.arange(0, BLOCK_N)
    k_tile = n[None, :] * k_stride_s + d[:, None]  # [D, N]
    v_tile = n[:, None] * v_stride_s + dv[None, :]  # [N, Dv]
    if HAS_WINDOW:
        seen_from = kv_len + tl.min(oldest, 0)  # older positions are outside every row's window: may hold NaN
    for n0 in tl.range(start, end, BLOCK_N):
        inside = n < end - n0
        if HAS_WINDOW:
            inside = inside & (n >= seen_from - n0)
        k_block = k_head + tl.cast(n0, tl.int64) * k_stride_s
        v_block = v_head + tl.cast(n0, tl.int64) * v_stride_s
        if HEAD_DIM == BLOCK_D:
            k = tl.load(k_block + k_tile, mask=inside[None, :], other=0.0)
        else:
            k = tl.load(k_block + k_tile, mask=inside[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
        if VALUE_DIM == BLOCK_DV:
            v = tl.load(v_block + v_tile, mask=inside[:, None], other=0.0)
        else:
            v = tl.load(v_block + v_tile, mask=inside[:, None] & (dv < VALUE_DIM)[None, :], other=0.0)
        k, v = _widened(k, UPCAST), _widened(v, UPCAST)
        scores = _scores(q, k, qk_scale, softcap, HAS_SOFTCAP, PRECISION)
        visible = inside[None, :]
        if HAS_WINDOW:
            visible = visible & ((n0 - kv_len + n)[None, :] >= oldest[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        best, total, acc = _accumulate(scores, v, best, total, acc, PRECISION)
    return best, total, acc


@triton.jit
def attend_nodes(
    q,
    kv,
    span,
    sight,
    scaling,
    state,
    bits_of,  # pointers to the rows' ancestor masks [M], and which rows are there
    node_depths_ptr,  # None without a window
    node_depths_at,  # where this sequence's begin
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter has no bfloat16 dot
):
    """Attend to nodes of the graph that the rows' ancestor masks show. Returns the state after them."""
    k_head, v_head, k_stride_s, v_stride_s = kv
    start, end = span
    kv_len, oldest = sight
    qk_scale, softcap = scaling
    best, total, acc = state
    mask_row, in_m = bits_of
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    k_nodes = k_head + kv_len.to(tl.int64) * k_stride_s
    v_nodes = v_head + kv_len.to(tl.int64) * v_stride_s
    j = tl.arange(0, 32)
    k_node_tile = j[None, :] * k_stride_s + d[:, None]  # [D, 32]
    v_node_tile = j[:, None] * v_stride_s + dv[None, :]  # [32, Dv]
    # One mask word a row and tile. Few iterations: prefetching would only take registers from the prefix.
    for j0 in tl.range(start, end, 32, num_stages=1):
        is_node = j < end - j0
        k_node_block = k_nodes + tl.cast(j0, tl.int64) * k_stride_s
        v_node_block = v_nodes + tl.cast(j0, tl.int64) * v_stride_s
        node_k = tl.load(k_node_block + k_node_tile, mask=is_node[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
        node_v = tl.load(v_node_block + v_node_tile, mask=is_node[:, None] & (dv < VALUE_DIM)[None, :], other=0.0)
        node_k, node_v = _widened(node_k, UPCAST), _widened(node_v, UPCAST)
        bits = tl.load(mask_row + j0 // 32, mask=in_m, other=0)  # [M]
        sees = (((bits[:, None] >> j[None, :]) & 1) != 0) & is_node[None, :]
        if HAS_WINDOW:
            node_depth = tl.load(node_depths_ptr + node_depths_at + j0 + j, mask=is_node, other=0)
            sees = sees & (node_depth[None, :] >= oldest[:, None])
        node_scores = _scores(q, node_k, qk_scale, softcap, HAS_SOFTCAP, PRECISION)
        node_scores = tl.where(sees, node_scores, float("-inf"))
        # 0 · NaN is NaN: values that are not finite leave the product, and spoil the rows that do see them.
        finite = tl.abs(node_v) < float("inf")
        node_v = tl.where(finite, node_v, 0.0)
        spoiled = tl.min(finite.to(tl.int32), 1) == 0  # [N]
        spoils = tl.max((sees & spoiled[None, :]).to(tl.int32), 1) != 0  # [M]
        best, total, acc = _accumulate(node_scores, node_v, best, total, acc, PRECISION)
        total = tl.where(spoils, float("nan"), total)
    return best, total, acc


@triton.jit
def store_partial(
    state, partial_out_ptr, partial_lse_ptr, out_row, in_m, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr
):
    """Store the normalised output and the base-2 log-sum-exp of this split."""
    best, total, acc = state
    dv = tl.arange(0, BLOCK_DV)
    nonempty = total != 0.0
    lse = tl.where(nonempty, best + tl.math.log2(tl.where(nonempty, total, 1.0)), EMPTY)
    out = acc / tl.where(nonempty, total, 1.0)[:, None]
    tl.store(partial_lse_ptr + out_row, lse, mask=in_m)
    tl.store(
        partial_out_ptr + out_row[:, None] * VALUE_DIM + dv[None, :],
        out,
        mask=in_m[:, None] & (dv < VALUE_DIM)[None, :],
    )
