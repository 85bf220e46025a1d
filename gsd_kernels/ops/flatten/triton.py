"""Unrolling the graph in one launch, one program per sequence.

Best first, literally: the open children of all rows so far lie in registers as one 64-bit key each, whose maximum is
the next row. The order is total and a child never precedes its parent, so this gives the rows of the reference, which
works level by level; here the cost is one reduction a row, whatever the depth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...config import MAX_BRANCH, MAX_NODES
from ...graph import Rows, num_words
from ..triton_common import ordered, plain

EMPTY = tl.constexpr(-(2**63))


@triton.jit
def _score_of(key):
    """The float32 in the key's upper half."""
    high = (key >> 32).to(tl.int32)
    return tl.where(high < 0, high ^ 0x7FFFFFFF, high).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["max_path", "capacity", "branch", "max_rows", "words"])  # shapes share what is compiled
def _flatten_kernel(
    edge_targets_ptr,  # int32 [B, N, K]
    edge_log_probs_ptr,  # float32 [B, N, K]
    node_tokens_ptr,  # int32 [B, N]
    token_ids_ptr,  # the rows from here on: [B, R]
    parent_rows_ptr,
    depths_ptr,
    ancestor_mask_ptr,  # int32 [B, R, words]
    node_ids_ptr,
    scores_ptr,
    num_rows_ptr,
    max_path,
    capacity,
    branch,
    max_rows,
    words,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    edge_targets_ptr += b * capacity * branch
    edge_log_probs_ptr += b * capacity * branch
    row = tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    row_node = tl.where(row == 0, 0, -1)
    row_parent = tl.full([BLOCK_R], -1, tl.int32)
    row_depth = tl.zeros([BLOCK_R], tl.int32)
    row_score = tl.where(row == 0, 0.0, float("-inf"))
    open_keys = tl.full([BLOCK_R, BLOCK_K], EMPTY, tl.int64)

    node = tl.max(tl.where(row == 0, 0, -1), 0)  # of the row added last; −1 when the graph is used up
    score = tl.max(tl.where(row == 0, 0.0, float("-inf")), 0)
    depth = tl.max(row_depth, 0)
    count = depth + 1
    for r in tl.range(1, max_rows):
        # Open the children of row r − 1. Key: score, then depth asc, parent row asc, edge asc; the node rides along.
        grows = k < tl.where((node >= 0) & (depth < max_path), branch, 0)
        child = tl.load(edge_targets_ptr + node * branch + k, mask=grows, other=-1)
        exists = grows & (child >= 0) & (child < capacity)
        log_prob = tl.load(edge_log_probs_ptr + node * branch + k, mask=exists, other=float("-inf"))
        path = score + plain(log_prob)
        low = ((127 - (depth + 1)) << 22) | ((127 - (r - 1)) << 15) | ((31 - k) << 10) | child
        key = tl.where(path > float("-inf"), (ordered(path).to(tl.int64) << 32) | low.to(tl.int64), EMPTY)  # [K]
        open_keys = tl.where((row == r - 1)[:, None], key[None, :], open_keys)
        # Take the best open child as row r.
        best = tl.max(tl.max(open_keys, 1), 0)
        open_keys = tl.where(open_keys == best, EMPTY, open_keys)
        found = best != EMPTY
        node = tl.where(found, (best & 1023).to(tl.int32), -1)
        score = _score_of(best)
        depth = 127 - ((best >> 22) & 127).to(tl.int32)
        parent = 127 - ((best >> 15) & 127).to(tl.int32)
        here = (row == r) & found
        row_node = tl.where(here, node, row_node)
        row_parent = tl.where(here, parent, row_parent)
        row_depth = tl.where(here, depth, row_depth)
        row_score = tl.where(here, score, row_score)
        count += found.to(tl.int32)

    in_r = row < max_rows
    out = b * max_rows + row
    tokens = tl.load(node_tokens_ptr + b * capacity + row_node, mask=row_node >= 0, other=0)
    tl.store(token_ids_ptr + out, tokens, mask=in_r)
    tl.store(parent_rows_ptr + out, row_parent, mask=in_r)
    tl.store(depths_ptr + out, row_depth, mask=in_r)
    tl.store(node_ids_ptr + out, row_node, mask=in_r)
    tl.store(scores_ptr + out, row_score, mask=in_r)
    tl.store(num_rows_ptr + b, count)
    tl.debug_barrier()
    # All rows climb to the root together and collect the rows that they pass.
    for w in tl.range(0, words):
        mask = tl.where(row // 32 == w, 1 << (row % 32), 0)
        up = row_parent
        for _ in tl.range(0, max_path):
            mask |= tl.where((up >= 0) & (up // 32 == w), 1 << (up % 32), 0)
            up = tl.load(parent_rows_ptr + b * max_rows + up, mask=up >= 0, other=-1)
        tl.store(ancestor_mask_ptr + out * words + w, mask, mask=in_r)


def flatten(
    token_ids: Tensor,  # int32 [B, N]
    edge_targets: Tensor,  # int32 [B, N, K]
    edge_log_probs: Tensor,  # float32 [B, N, K]
    max_rows: int,
    max_path: int,
) -> Rows:
    """One launch; the graph's storage is dense."""
    batch, nodes, branch = edge_targets.shape
    if nodes > MAX_NODES or branch > MAX_BRANCH:  # what the sort key has bits for
        raise ValueError(f"graph: backend 'triton' takes up to {MAX_NODES} nodes and {MAX_BRANCH} edges of a node")
    words = num_words(max_rows)

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=token_ids.device)

    rows = Rows(
        token_ids=new(batch, max_rows),
        parent_rows=new(batch, max_rows),
        depths=new(batch, max_rows),
        ancestor_mask=new(batch, max_rows, words),
        node_ids=new(batch, max_rows),
        scores=new(batch, max_rows, dtype=torch.float32),
        num_rows=new(batch),
    )
    block_r, block_k = triton.next_power_of_2(max_rows), triton.next_power_of_2(branch)
    if batch:
        _flatten_kernel[(batch,)](
            edge_targets,
            edge_log_probs,
            token_ids,
            *rows.tensors(),
            max_path,
            nodes,
            branch,
            max_rows,
            words,
            BLOCK_R=block_r,
            BLOCK_K=block_k,
            num_warps=1 if block_r * block_k <= 512 else 4,  # one warp reduces without a barrier
        )
    return rows
