"""Merging of one drafted level in one launch, one program per sequence.

The steps are those of ``reference.py``. Candidates are ranked by counting, for each, how many come before it in the
total order: no sort, and ties cannot depend on the hardware. Comparisons of all pairs run over tiles of ``ROWS`` by
``COLUMNS``: with whole columns of 512 candidates the contexts alone would overflow the registers. Between the steps
the candidates lie in scratch memory, 48 bytes each. The steps on candidates are in ``triton_candidates.py``, those that
write the graph and the next frontier in ``triton_level.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...config import MAX_CONTEXT
from ...graph import Frontier, TokenGraph
from .triton_candidates import find_leaders, given_fields, graph_of, join_nodes, prune, rank, ranked_fields
from .triton_level import (
    load_ranked,
    mark_expanded,
    number_nodes,
    pad_frontier,
    write_edges,
    write_frontier,
    write_nodes,
)

ROWS = 32
COLUMNS = 16


# Sizes that differ between shapes, and places within them, are arguments that nothing is specialised for: the shapes
# that an automatic policy chooses among share what is compiled, seconds a variant.
@triton.jit(
    do_not_specialize=["merge_context", "first_slot", "width", "capacity", "branch", "words", "next_width"],
)
def _merge_kernel(
    # The graph, one sequence after another; see TokenGraph. N nodes, K branch, C context tokens.
    token_ids_ptr,
    parents_ptr,
    depths_ptr,
    scores_ptr,
    contexts_ptr,
    expanded_ptr,  # uint8
    ancestor_mask_ptr,
    edge_targets_ptr,
    edge_log_probs_ptr,
    num_nodes_ptr,
    num_merges_ptr,
    # The level.
    frontier_ptr,  # int32 [B, W]
    cand_tokens_ptr,  # int32 [B, W, K]
    cand_log_probs_ptr,  # float32 [B, W, K]
    scratch_ptr,  # int32 [B, 12, M]
    # The next frontier.
    next_nodes_ptr,  # int32 [B, next_width]
    next_tokens_ptr,
    next_depths_ptr,
    next_mask_ptr,  # int32 [B, next_width, words]
    log_sibling_ratio,
    log_min_prob,
    merge_context,
    first_slot,
    width,
    capacity,  # N
    branch,  # K
    words,
    next_width,
    CONTEXT: tl.constexpr,
    MERGING: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,  # candidates
    BLOCK_NEXT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Merge one level of one sequence. Barriers are where scratch memory or the graph is read by other threads."""
    b = tl.program_id(0).to(tl.int64)
    nodes = (token_ids_ptr, parents_ptr, depths_ptr, scores_ptr, contexts_ptr, expanded_ptr, ancestor_mask_ptr)
    nodes, edges = graph_of(nodes, (edge_targets_ptr, edge_log_probs_ptr), b, capacity, branch, CONTEXT, words)
    size_m = width * branch
    level = (frontier_ptr + b * width, cand_tokens_ptr + b * size_m, cand_log_probs_ptr + b * size_m)
    scratch_ptr += b * 12 * size_m
    given = given_fields(scratch_ptr, size_m)
    ranked = ranked_fields(scratch_ptr, size_m)
    joined_at, leader_at, new_id_at = scratch_ptr + 9 * size_m, scratch_ptr + 10 * size_m, scratch_ptr + 11 * size_m
    num_nodes = tl.load(num_nodes_ptr + b)
    readable = tl.minimum(num_nodes, capacity)

    frontier = prune(level, nodes, given, width, log_sibling_ratio, capacity, branch, BLOCK_W, BLOCK_K)
    tl.debug_barrier()
    rank(given, ranked, size_m, capacity, branch, ROWS, COLUMNS)
    tl.debug_barrier()
    join_nodes(nodes, readable, ranked, joined_at, size_m, merge_context, capacity, CONTEXT, MERGING, ROWS, COLUMNS)
    tl.debug_barrier()
    find_leaders(nodes, ranked, joined_at, leader_at, size_m, merge_context, CONTEXT, MERGING, BLOCK_M, ROWS, COLUMNS)
    tl.debug_barrier()
    candidates = load_ranked(ranked, size_m, BLOCK_M)
    target, leads, new_id, exists = number_nodes(joined_at, leader_at, new_id_at, size_m, num_nodes, capacity, BLOCK_M)
    write_nodes(nodes, candidates, leads, new_id, exists, capacity, CONTEXT)
    num_nodes += tl.sum(leads.to(tl.int32), 0)
    write_edges(edges, candidates, target, size_m, BLOCK_M)
    mark_expanded(nodes, frontier, BLOCK_W)
    tl.debug_barrier()  # the nodes are read again below
    following = (next_nodes_ptr, next_tokens_ptr, next_depths_ptr, next_mask_ptr)
    readable = tl.minimum(num_nodes, capacity)
    open_nodes = write_frontier(
        nodes, following, b, readable, log_min_prob, first_slot, words, next_width, ROWS, COLUMNS
    )
    pad_frontier(following, b, open_nodes, first_slot, words, next_width, BLOCK_NEXT)
    tl.store(num_nodes_ptr + b, num_nodes)
    merges = tl.sum((exists & ~leads).to(tl.int32), 0)
    tl.store(num_merges_ptr + b, tl.load(num_merges_ptr + b) + merges)


def merge(
    tensors: Sequence[Tensor],  # of a TokenGraph
    frontier: Tensor,  # int32 [B, W]
    cand_tokens: Tensor,  # int32 [B, W, K]
    cand_log_probs: Tensor,  # float32 [B, W, K]
    level: int,
    width: int,
    merge_context: int,
    log_sibling_ratio: float,
    log_min_prob: float,
) -> Frontier:
    """One launch; the graph's storage is dense."""
    graph = TokenGraph(*tensors)
    batch, expanded, branch = cand_tokens.shape
    words, device = graph.ancestor_mask.shape[-1], frontier.device
    size_m = expanded * branch

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    result = Frontier(new(batch, width), new(batch, width), new(batch, width), new(batch, width, words))
    if batch == 0:
        return result
    storage = [t.view(torch.uint8) if t.dtype == torch.bool else t for t in graph.tensors()]
    _merge_kernel[(batch,)](
        *storage,
        frontier.contiguous(),
        cand_tokens.contiguous(),
        cand_log_probs.contiguous(),
        new(batch, 12, size_m),
        result.node_ids,
        result.token_ids,
        result.depths,
        result.ancestor_mask,
        log_sibling_ratio,
        log_min_prob,
        merge_context,
        level * width,
        expanded,
        graph.capacity,
        branch,
        words,
        width,
        CONTEXT=MAX_CONTEXT,
        MERGING=merge_context >= 0,
        BLOCK_W=max(8, triton.next_power_of_2(expanded)),
        BLOCK_K=max(4, triton.next_power_of_2(branch)),
        BLOCK_M=max(32, triton.next_power_of_2(size_m)),
        BLOCK_NEXT=max(8, triton.next_power_of_2(width)),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4 if size_m <= ROWS else 8,
    )
    return result
