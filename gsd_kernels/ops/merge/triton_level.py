"""The results of a level: its nodes, its edges and the next frontier. Parts of ``_merge_kernel``."""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_candidates import context_token


@triton.jit
def load_ranked(ranked, size_m, BLOCK_M: tl.constexpr):
    """The candidates in order, [M] each: parent node, token, log-probability, score, place of the edge."""
    origin_at, token_at, log_prob_at, score_at, edge_at = ranked
    m = tl.arange(0, BLOCK_M)
    in_m = m < size_m
    u = tl.load(origin_at + m, mask=in_m, other=0)
    token = tl.load(token_at + m, mask=in_m, other=-1)
    score = tl.load(score_at + m, mask=in_m, other=float("-inf"))
    log_prob = tl.load(log_prob_at + m, mask=in_m, other=0.0)
    edge = tl.load(edge_at + m, mask=in_m, other=-1)
    return u, token, log_prob, score, edge


@triton.jit
def number_nodes(joined_at, leader_at, new_id_at, size_m, num_nodes, capacity, BLOCK_M: tl.constexpr):
    """Give the leaders ids, in order, by way of ``new_id_at``.

    Returns [M] each: the node an edge leads to (−1: none), whether the candidate leads, the id it then has, and
    whether it exists.
    """
    m = tl.arange(0, BLOCK_M)
    in_m = m < size_m
    joined = tl.load(joined_at + m, mask=in_m, other=capacity)
    leader = tl.load(leader_at + m, mask=in_m, other=0)
    exists = joined < capacity
    leads = (joined < 0) & (leader == m)
    new_id = num_nodes + tl.cumsum(leads.to(tl.int32), 0) - 1
    tl.store(new_id_at + m, new_id, mask=in_m)
    tl.debug_barrier()
    followed = tl.load(new_id_at + leader, mask=in_m, other=-1)
    target = tl.where(exists, tl.where(joined >= 0, joined, followed), -1)
    return target, leads, new_id, exists


@triton.jit
def write_nodes(
    nodes,  # of graph_of
    candidates,  # of load_ranked
    leads,
    new_id,
    exists,
    capacity,
    CONTEXT: tl.constexpr,
):
    """Write the leaders as nodes."""
    token_ids_ptr, parents_ptr, depths_ptr, scores_ptr, contexts_ptr, _, _ = nodes
    u, token, _, score, _ = candidates
    writes = leads & (new_id < capacity)
    tl.store(token_ids_ptr + new_id, token, mask=writes)
    tl.store(parents_ptr + new_id, u, mask=writes)
    tl.store(depths_ptr + new_id, tl.load(depths_ptr + u, mask=exists, other=0) + 1, mask=writes)
    tl.store(scores_ptr + new_id, score, mask=writes)
    for t in tl.static_range(CONTEXT):
        mine = context_token(token_ids_ptr, contexts_ptr, u, t, exists, CONTEXT)
        tl.store(contexts_ptr + new_id * CONTEXT + t, mine, mask=writes)


@triton.jit
def write_edges(edges, candidates, target, size_m, BLOCK_M: tl.constexpr):
    """Write the edges, in the candidates' own order."""
    edge_targets_ptr, edge_log_probs_ptr = edges
    _, _, log_prob, _, edge = candidates
    in_m = tl.arange(0, BLOCK_M) < size_m
    tl.store(edge_targets_ptr + edge, target, mask=in_m & (edge >= 0))
    tl.store(edge_log_probs_ptr + edge, tl.where(target >= 0, log_prob, 0.0), mask=in_m & (edge >= 0))


@triton.jit
def mark_expanded(nodes, frontier, BLOCK_W: tl.constexpr):
    """Mark the frontier's nodes int32 [W], −1 for padding."""
    _, _, _, _, _, expanded_ptr, _ = nodes
    tl.store(expanded_ptr + frontier, tl.full([BLOCK_W], 1, tl.uint8), mask=frontier >= 0)


@triton.jit
def _open_score(scores_ptr, expanded_ptr, n, num_nodes, log_min_prob):
    """Scores of the nodes that may be expanded, −inf for the others."""
    inside = n < num_nodes
    score = tl.load(scores_ptr + n, mask=inside, other=float("-inf"))
    expanded = tl.load(expanded_ptr + n, mask=inside, other=1)
    return tl.where((expanded == 0) & (score >= log_min_prob), score, float("-inf"))


@triton.jit
def write_frontier(
    nodes,
    frontier,  # pointers to the next frontier: nodes, tokens, depths int32 [B, W'], masks int32 [B, W', words]
    b,
    num_nodes,
    log_min_prob,
    first_slot,
    words,
    next_width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the next frontier: the best unexpanded nodes, ordered like the candidates. Returns how many are open."""
    token_ids_ptr, parents_ptr, depths_ptr, scores_ptr, _, expanded_ptr, ancestor_mask_ptr = nodes
    next_nodes_ptr, next_tokens_ptr, next_depths_ptr, next_mask_ptr = frontier
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    open_nodes = 0
    for n0 in tl.range(0, num_nodes, ROWS):
        n = n0 + rows
        my_score = _open_score(scores_ptr, expanded_ptr, n, num_nodes, log_min_prob)
        is_open = my_score > float("-inf")
        open_nodes += tl.sum(is_open.to(tl.int32), 0)
        place = tl.zeros([ROWS], tl.int32)
        for c0 in tl.range(0, num_nodes, COLUMNS):
            c = c0 + columns
            other_score = _open_score(scores_ptr, expanded_ptr, c, num_nodes, log_min_prob)[None, :]
            before = (other_score > my_score[:, None]) | (
                (other_score == my_score[:, None]) & (c[None, :] < n[:, None])
            )
            place += tl.sum(before.to(tl.int32), 1)
        chosen = is_open & (place < next_width)
        out = b * next_width + place
        tl.store(next_nodes_ptr + out, n, mask=chosen)
        tl.store(next_tokens_ptr + out, tl.load(token_ids_ptr + n, mask=chosen, other=0), mask=chosen)
        tl.store(next_depths_ptr + out, tl.load(depths_ptr + n, mask=chosen, other=0), mask=chosen)
        # A chosen node's parent is expanded, hence not chosen itself: no mask is read after it is written.
        up = tl.maximum(tl.load(parents_ptr + n, mask=chosen, other=0), 0)
        for w in tl.range(0, words):
            own = tl.where((first_slot + place) // 32 == w, 1 << ((first_slot + place) % 32), 0)
            mask = tl.load(ancestor_mask_ptr + up * words + w, mask=chosen, other=0) | own
            tl.store(ancestor_mask_ptr + n * words + w, mask, mask=chosen)
            tl.store(next_mask_ptr + out * words + w, mask, mask=chosen)
    return open_nodes


@triton.jit
def pad_frontier(frontier, b, open_nodes, first_slot, words, next_width, BLOCK_NEXT: tl.constexpr):
    """Fill what the open nodes leave of the next frontier: node −1, token 0, depth 1, seeing itself alone."""
    next_nodes_ptr, next_tokens_ptr, next_depths_ptr, next_mask_ptr = frontier
    p = tl.arange(0, BLOCK_NEXT)
    padding = (p >= open_nodes) & (p < next_width)
    tl.store(next_nodes_ptr + b * next_width + p, tl.full([BLOCK_NEXT], -1, tl.int32), mask=padding)
    tl.store(next_tokens_ptr + b * next_width + p, tl.zeros([BLOCK_NEXT], tl.int32), mask=padding)
    tl.store(next_depths_ptr + b * next_width + p, tl.full([BLOCK_NEXT], 1, tl.int32), mask=padding)
    for w in tl.range(0, words):
        own = tl.where((first_slot + p) // 32 == w, 1 << ((first_slot + p) % 32), 0)
        tl.store(next_mask_ptr + (b * next_width + p) * words + w, own, mask=padding)
