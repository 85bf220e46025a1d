"""Merging of one drafted level in one launch, one program per sequence.

The steps are those of ``reference.py``. Candidates are ranked by counting, for each, how many come before it in the
total order: no sort, and ties cannot depend on the hardware. Nothing is moved: a candidate stays where it came in, and
who is first among equals is asked of the places in the order. Comparisons of all pairs run over tiles of ``ROWS`` by
``COLUMNS``: with whole columns of 512 candidates the contexts alone would overflow the registers. Between the steps
candidates lie in scratch memory, the fields of :func:`_fields` and a context each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...config import MAX_CONTEXT
from ...graph import Frontier, TokenGraph
from ..triton_common import plain

ROWS = 32
COLUMNS = 16
FIELDS = tl.constexpr(7)


@triton.jit
def _fields(scratch_ptr, size_m):
    """Pointers to what is kept of candidates, [M] each: parent node (N: none), token, score (−inf: pruned), place in
    the order; the node joined (−1: none), the place of who becomes their node; by place ids of new nodes; contexts."""
    return (
        scratch_ptr,
        scratch_ptr + size_m,
        (scratch_ptr + 2 * size_m).to(tl.pointer_type(tl.float32)),
        scratch_ptr + 3 * size_m,
        scratch_ptr + 4 * size_m,
        scratch_ptr + 5 * size_m,
        scratch_ptr + 6 * size_m,
        scratch_ptr + FIELDS * size_m,
    )


@triton.jit
def _prune(
    frontier_ptr,  # int32 [W]
    cand_tokens_ptr,  # int32 [W, K]
    cand_log_probs_ptr,  # float32 [W, K]
    nodes,  # pointers: tokens, contexts, scores
    candidates,  # pointers: parent nodes, tokens, scores, contexts
    width,
    log_sibling_ratio,
    capacity,
    branch,
    CONTEXT: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Drop what is absent, too improbable beside the best sibling, or a repeated sibling: its score is −inf.

    Writes ``candidates``; returns the frontier's nodes int32 [W], −1 for padding.
    """
    node_token_at, node_context_at, node_score_at = nodes
    origin_at, token_at, score_at, context_at = candidates
    i = tl.arange(0, BLOCK_W)
    r = tl.arange(0, BLOCK_K)
    in_w = i < width
    here = in_w[:, None] & (r < branch)[None, :]  # [W, K]
    cand = i[:, None] * branch + r[None, :]
    node = tl.load(frontier_ptr + i, mask=in_w, other=-1)  # [W]
    node = tl.where(node < capacity, node, -1)
    real = in_w & (node >= 0)
    token = tl.load(cand_tokens_ptr + cand, mask=here, other=-1)
    log_prob = plain(tl.load(cand_log_probs_ptr + cand, mask=here, other=float("-inf")))
    threshold = tl.max(log_prob, 1) + log_sibling_ratio  # [W]
    present = (log_prob > float("-inf")) & (log_prob >= threshold[:, None]) & (token >= 0) & real[:, None]
    for s in tl.range(0, branch - 1):
        sibling = tl.load(cand_tokens_ptr + i * branch + s, mask=in_w, other=-1)
        sibling_log_prob = plain(tl.load(cand_log_probs_ptr + i * branch + s, mask=in_w, other=float("-inf")))
        counts = (sibling_log_prob > float("-inf")) & (sibling_log_prob >= threshold)  # its token decides the rest
        present = present & ~((token == sibling[:, None]) & counts[:, None] & (r > s)[None, :])
    origin = tl.where(real, node, capacity)  # [W]; padding comes last among equals
    parent_score = tl.load(node_score_at + node, mask=real, other=0.0)
    tl.store(origin_at + cand, tl.broadcast_to(origin[:, None], [BLOCK_W, BLOCK_K]), mask=here)
    tl.store(token_at + cand, token, mask=here)
    tl.store(score_at + cand, tl.where(present, parent_score[:, None] + log_prob, float("-inf")), mask=here)
    for t in tl.static_range(CONTEXT):  # the parent's token, then its context
        before_at = node_token_at + node if t == 0 else node_context_at + node * CONTEXT + (t - 1)
        before = tl.load(before_at, mask=real, other=-1)
        tl.store(context_at + cand * CONTEXT + t, tl.broadcast_to(before[:, None], [BLOCK_W, BLOCK_K]), mask=here)
    return node


@triton.jit
def _agreement(mine_at, theirs_at, in_m, in_n, alike, CONTEXT: tl.constexpr):
    """The number of nearest tokens that the contexts of pairs [ROWS, COLUMNS] which are alike have in common."""
    agreement = alike.to(tl.int32) * 0
    for t in tl.static_range(CONTEXT):
        mine = tl.load(mine_at + t, mask=in_m, other=-1)[:, None]
        alike = alike & (mine == tl.load(theirs_at + t, mask=in_n, other=-1)[None, :]) & (mine >= 0)
        agreement += alike.to(tl.int32)
    return agreement


@triton.jit
def _order_and_join(
    nodes,  # pointers: tokens, contexts, scores
    num_nodes,
    candidates,  # pointers: parent nodes, tokens, scores, contexts
    place_at,
    joined_at,
    size_m,
    merge_context,
    capacity,
    CONTEXT: tl.constexpr,
    MERGING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Find each candidate's place (score desc, parent id asc, rank asc), and the node that it joins.

    That is the one with the longest agreeing context, the best score, the lowest id. Writes ``place_at`` and
    ``joined_at``: the node; −1: fresh; capacity: absent.
    """
    node_token_at, node_context_at, node_score_at = nodes
    origin_at, token_at, score_at, context_at = candidates
    columns = tl.arange(0, COLUMNS)
    for m0 in tl.range(0, size_m, ROWS):
        m = m0 + tl.arange(0, ROWS)
        in_m = m < size_m
        u = tl.load(origin_at + m, mask=in_m, other=0)
        my_score = tl.load(score_at + m, mask=in_m, other=float("-inf"))
        place = tl.zeros([ROWS], tl.int32)
        for c0 in tl.range(0, size_m, COLUMNS):
            c = c0 + columns
            in_c = c < size_m
            other_u = tl.load(origin_at + c, mask=in_c, other=0)[None, :]
            other_score = tl.load(score_at + c, mask=in_c, other=0.0)[None, :]
            # Equal parents: the candidates of one node, or padding, in the order they came in.
            first = (other_u < u[:, None]) | ((other_u == u[:, None]) & (c[None, :] < m[:, None]))
            before = (other_score > my_score[:, None]) | ((other_score == my_score[:, None]) & first)
            place += tl.sum((before & in_c[None, :]).to(tl.int32), 1)
        tl.store(place_at + m, place, mask=in_m)
        present = my_score > float("-inf")
        joined = tl.full([ROWS], -1, tl.int32)
        if MERGING:
            my_token = tl.load(token_at + m, mask=in_m, other=-1)
            my_context = context_at + m * CONTEXT
            best_agreement = tl.full([ROWS], -1, tl.int32)
            best_score = tl.full([ROWS], float("-inf"), tl.float32)
            for n0 in tl.range(0, num_nodes, COLUMNS):
                n = n0 + columns
                in_n = n < num_nodes
                token = tl.load(node_token_at + n, mask=in_n, other=-2)
                joinable = present[:, None] & (n[None, :] > u[:, None]) & (my_token[:, None] == token[None, :])
                agreement = _agreement(my_context, node_context_at + n * CONTEXT, in_m, in_n, joinable, CONTEXT)
                joinable = joinable & (agreement >= merge_context)
                longest = tl.max(tl.where(joinable, agreement, -1), 1)
                joinable = joinable & (agreement == longest[:, None])
                score = tl.load(node_score_at + n, mask=in_n, other=float("-inf"))[None, :]
                top = tl.max(tl.where(joinable, score, float("-inf")), 1)
                joinable = joinable & (score == top[:, None])
                lowest = tl.min(tl.where(joinable, n[None, :], capacity), 1)
                better = (longest > best_agreement) | ((longest == best_agreement) & (top > best_score))
                better = better & (longest >= 0)  # ties stay with the earlier columns: lower ids
                joined = tl.where(better, lowest, joined)
                best_score = tl.where(better, top, best_score)
                best_agreement = tl.where(better, longest, best_agreement)
        tl.store(joined_at + m, tl.where(present, joined, capacity), mask=in_m)


@triton.jit
def _find_leaders(
    candidates,
    place_at,
    joined_at,
    leader_at,
    size_m,
    merge_context,
    CONTEXT: tl.constexpr,
    MERGING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Of the fresh ones, find the first with a given token and context: it becomes a node and the others join it.

    Writes ``leader_at``: a place in the order, its own for who leads.
    """
    _, token_at, _, context_at = candidates
    for m0 in tl.range(0, size_m, ROWS):
        m = m0 + tl.arange(0, ROWS)
        in_m = m < size_m
        leader = tl.load(place_at + m, mask=in_m, other=0)
        if MERGING:
            my_token = tl.load(token_at + m, mask=in_m, other=-1)
            my_context = context_at + m * CONTEXT
            fresh = tl.load(joined_at + m, mask=in_m, other=0) < 0
            for c0 in tl.range(0, size_m, COLUMNS):
                c = c0 + tl.arange(0, COLUMNS)
                in_c = c < size_m
                token = tl.load(token_at + c, mask=in_c, other=-2)
                other_fresh = tl.load(joined_at + c, mask=in_c, other=0) < 0
                alike = fresh[:, None] & other_fresh[None, :] & (my_token[:, None] == token[None, :])
                agreement = _agreement(my_context, context_at + c * CONTEXT, in_m, in_c, alike, CONTEXT)
                alike = alike & (agreement >= merge_context)
                place = tl.load(place_at + c, mask=in_c, other=0)
                leader = tl.minimum(leader, tl.min(tl.where(alike, place[None, :], size_m), 1))
        tl.store(leader_at + m, leader, mask=in_m)


@triton.jit
def _number(new_id_at, leads, place, num_nodes, m, in_m):
    """Write, by place in the order, the ids of the nodes that leaders [M] become."""
    tl.store(new_id_at + place, leads.to(tl.int32), mask=in_m)
    tl.debug_barrier()
    in_order = tl.load(new_id_at + m, mask=in_m, other=0)
    tl.debug_barrier()
    tl.store(new_id_at + m, num_nodes + tl.cumsum(in_order, 0) - 1, mask=in_m)
    tl.debug_barrier()


@triton.jit
def _write_nodes(nodes, candidates, new_id, m, writes, CONTEXT: tl.constexpr):
    """Write tokens, contexts and scores of candidates [M] as those of nodes."""
    node_token_at, node_context_at, node_score_at = nodes
    _, token_at, score_at, context_at = candidates
    tl.store(node_token_at + new_id, tl.load(token_at + m, mask=writes, other=0), mask=writes)
    tl.store(node_score_at + new_id, tl.load(score_at + m, mask=writes, other=0.0), mask=writes)
    for t in tl.static_range(CONTEXT):
        before = tl.load(context_at + m * CONTEXT + t, mask=writes, other=0)
        tl.store(node_context_at + new_id * CONTEXT + t, before, mask=writes)


@triton.jit
def _open_score(score_at, expanded_at, n, num_nodes, log_min_prob):
    """Scores of the nodes that may be expanded, −inf for the others."""
    inside = n < num_nodes
    score = tl.load(score_at + n, mask=inside, other=float("-inf"))
    expanded = tl.load(expanded_at + n, mask=inside, other=1)
    return tl.where((expanded == 0) & (score >= log_min_prob), score, float("-inf"))


@triton.jit
def _write_frontier(
    nodes,  # pointers: tokens, contexts, scores
    more,  # pointers: parents, depths, expanded, ancestor masks
    following,
    b,
    num_nodes,
    log_min_prob,
    first_slot,
    words,
    next_width,
    BLOCK_NEXT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the next frontier: the best unexpanded nodes, ordered like the candidates, and their masks."""
    node_token_at, _, node_score_at = nodes
    parent_at, depth_at, expanded_at, mask_at = more
    # Padding first, which is node −1, token 0, depth 1 and sees itself alone.
    next_node_at, next_token_at = following[0] + b * next_width, following[1] + b * next_width
    next_depth_at, next_mask_at = following[2] + b * next_width, following[3] + b * next_width * words
    p = tl.arange(0, BLOCK_NEXT)
    tl.store(next_node_at + p, tl.full([BLOCK_NEXT], -1, tl.int32), mask=p < next_width)
    tl.store(next_token_at + p, tl.zeros([BLOCK_NEXT], tl.int32), mask=p < next_width)
    tl.store(next_depth_at + p, tl.full([BLOCK_NEXT], 1, tl.int32), mask=p < next_width)
    for w in tl.range(0, words):
        own = tl.where((first_slot + p) // 32 == w, 1 << ((first_slot + p) % 32), 0)
        tl.store(next_mask_at + p * words + w, own, mask=p < next_width)
    tl.debug_barrier()
    for n0 in tl.range(0, num_nodes, ROWS):
        n = n0 + tl.arange(0, ROWS)
        my_score = _open_score(node_score_at, expanded_at, n, num_nodes, log_min_prob)
        place = tl.zeros([ROWS], tl.int32)
        for c0 in tl.range(0, num_nodes, COLUMNS):
            c = c0 + tl.arange(0, COLUMNS)
            other_score = _open_score(node_score_at, expanded_at, c, num_nodes, log_min_prob)[None, :]
            first = (other_score == my_score[:, None]) & (c[None, :] < n[:, None])
            place += tl.sum(((other_score > my_score[:, None]) | first).to(tl.int32), 1)
        chosen = (my_score > float("-inf")) & (place < next_width)
        tl.store(next_node_at + place, n, mask=chosen)
        tl.store(next_token_at + place, tl.load(node_token_at + n, mask=chosen, other=0), mask=chosen)
        tl.store(next_depth_at + place, tl.load(depth_at + n, mask=chosen, other=0), mask=chosen)
        # A chosen node's parent is expanded, hence not chosen itself: no mask is read after it is written.
        up = tl.maximum(tl.load(parent_at + n, mask=chosen, other=0), 0)
        for w in tl.range(0, words):
            own = tl.where((first_slot + place) // 32 == w, 1 << ((first_slot + place) % 32), 0)
            mask = tl.load(mask_at + up * words + w, mask=chosen, other=0) | own
            tl.store(mask_at + n * words + w, mask, mask=chosen)
            tl.store(next_mask_at + place * words + w, mask, mask=chosen)


# Sizes that differ between shapes, and places within them, are arguments that nothing is specialised for: the shapes
# that an automatic policy chooses among share what is compiled, seconds a variant.
@triton.jit(
    do_not_specialize=["merge_context", "first_slot", "width", "capacity", "branch", "words", "next_width"],
)
def _merge_kernel(
    graph,  # pointers, one sequence after another: see TokenGraph. N nodes, K branch, C context tokens
    level,  # pointers: frontier int32 [B, W], tokens int32 [B, W, K], log-probabilities float32 [B, W, K]
    scratch_ptr,  # int32 [B, FIELDS + C, M]
    following,  # pointers: the next frontier, see Frontier
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
    n0 = b * capacity
    node_token_at, parent_at, depth_at, node_score_at = graph[0] + n0, graph[1] + n0, graph[2] + n0, graph[3] + n0
    node_context_at, expanded_at, mask_at = graph[4] + n0 * CONTEXT, graph[5] + n0, graph[6] + n0 * words
    edge_target_at, edge_log_prob_at = graph[7] + n0 * branch, graph[8] + n0 * branch
    num_nodes = tl.load(graph[9] + b)
    size_m = width * branch
    cand_log_probs_ptr = level[2] + b * size_m
    scratch_ptr += b * (FIELDS + CONTEXT) * size_m
    origin_at, token_at, score_at, place_at, joined_at, leader_at, new_id_at, context_at = _fields(scratch_ptr, size_m)
    nodes = (node_token_at, node_context_at, node_score_at)
    candidates = (origin_at, token_at, score_at, context_at)

    frontier = _prune(
        level[0] + b * width, level[1] + b * size_m, cand_log_probs_ptr, nodes, candidates,
        width, log_sibling_ratio, capacity, branch, CONTEXT, BLOCK_W, BLOCK_K,
    )  # fmt: skip
    tl.debug_barrier()
    _order_and_join(
        nodes, tl.minimum(num_nodes, capacity), candidates, place_at, joined_at, size_m, merge_context, capacity,
        CONTEXT, MERGING, ROWS, COLUMNS,
    )  # fmt: skip
    tl.debug_barrier()
    _find_leaders(candidates, place_at, joined_at, leader_at, size_m, merge_context, CONTEXT, MERGING, ROWS, COLUMNS)
    tl.debug_barrier()
    m = tl.arange(0, BLOCK_M)
    in_m = m < size_m
    joined = tl.load(joined_at + m, mask=in_m, other=capacity)
    leader = tl.load(leader_at + m, mask=in_m, other=0)
    place = tl.load(place_at + m, mask=in_m, other=0)
    exists = joined < capacity
    leads = (joined < 0) & (leader == place)
    _number(new_id_at, leads, place, num_nodes, m, in_m)
    new_id = tl.load(new_id_at + leader, mask=in_m, other=-1)
    target = tl.where(exists, tl.where(joined >= 0, joined, new_id), -1)

    u = tl.load(origin_at + m, mask=in_m, other=0)
    writes = leads & (new_id < capacity)
    _write_nodes(nodes, candidates, new_id, m, writes, CONTEXT)
    tl.store(parent_at + new_id, u, mask=writes)
    tl.store(depth_at + new_id, tl.load(depth_at + u, mask=exists, other=0) + 1, mask=writes)
    num_nodes += tl.sum(leads.to(tl.int32), 0)
    tl.store(graph[9] + b, num_nodes)
    tl.store(graph[10] + b, tl.load(graph[10] + b) + tl.sum((exists & ~leads).to(tl.int32), 0))

    # All edges, in the candidates' own order.
    edge, real = u * branch + m % branch, in_m & (u < capacity)
    log_prob = plain(tl.load(cand_log_probs_ptr + m, mask=in_m, other=0.0))
    tl.store(edge_target_at + edge, target, mask=real)
    tl.store(edge_log_prob_at + edge, tl.where(target >= 0, log_prob, 0.0), mask=real)
    tl.store(expanded_at + frontier, tl.full([BLOCK_W], 1, tl.uint8), mask=frontier >= 0)
    tl.debug_barrier()  # the nodes are read again
    _write_frontier(
        nodes, (parent_at, depth_at, expanded_at, mask_at), following, b,
        tl.minimum(num_nodes, capacity), log_min_prob, first_slot, words, next_width, BLOCK_NEXT, ROWS, COLUMNS,
    )  # fmt: skip


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
    words = graph.ancestor_mask.shape[-1]
    size_m = expanded * branch

    def new(*shape: int) -> Tensor:
        return torch.empty((batch, *shape), dtype=torch.int32, device=frontier.device)

    result = Frontier(new(width), new(width), new(width), new(width, words))
    if batch == 0:
        return result
    _merge_kernel[(batch,)](
        tuple(t.view(torch.uint8) if t.dtype == torch.bool else t for t in tensors),
        (frontier.contiguous(), cand_tokens.contiguous(), cand_log_probs.contiguous()),
        new(FIELDS.value + MAX_CONTEXT, size_m),
        tuple(result.tensors()),
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
