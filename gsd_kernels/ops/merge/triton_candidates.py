"""The way of a level's candidates: pruned, put in order, joined with nodes that exist and with each other.

Parts of ``_merge_kernel``. Between them the candidates of a sequence lie in scratch memory, int32 [12, M]: as they came
in (:func:`given_fields`), in order (:func:`ranked_fields`), then the node joined, the leader and the new node's id.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import plain


@triton.jit
def graph_of(
    nodes,  # pointers: tokens, parents, depths, scores, contexts, expanded, ancestor masks; see TokenGraph
    edges,  # pointers: targets, log-probabilities
    b,
    capacity,
    branch,
    CONTEXT: tl.constexpr,
    words,
):
    """The same pointers into the graph of sequence ``b``: [N], contexts [N, C], masks [N, words], edges [N, K]."""
    token_ids_ptr, parents_ptr, depths_ptr, scores_ptr, contexts_ptr, expanded_ptr, ancestor_mask_ptr = nodes
    edge_targets_ptr, edge_log_probs_ptr = edges
    own_nodes = (
        token_ids_ptr + b * capacity,
        parents_ptr + b * capacity,
        depths_ptr + b * capacity,
        scores_ptr + b * capacity,
        contexts_ptr + b * capacity * CONTEXT,
        expanded_ptr + b * capacity,
        ancestor_mask_ptr + b * capacity * words,
    )
    return own_nodes, (edge_targets_ptr + b * capacity * branch, edge_log_probs_ptr + b * capacity * branch)


@triton.jit
def given_fields(scratch_ptr, size_m):
    """Pointers to the candidates as they came in, [M] each: parent node, token, log-probability, score."""
    return (
        scratch_ptr,
        scratch_ptr + size_m,
        (scratch_ptr + 2 * size_m).to(tl.pointer_type(tl.float32)),
        (scratch_ptr + 3 * size_m).to(tl.pointer_type(tl.float32)),
    )


@triton.jit
def ranked_fields(scratch_ptr, size_m):
    """Pointers to the same in order, [M] each, and last the place of the edge in the graph's edges (−1: padding)."""
    return (
        scratch_ptr + 4 * size_m,
        scratch_ptr + 5 * size_m,
        (scratch_ptr + 6 * size_m).to(tl.pointer_type(tl.float32)),
        (scratch_ptr + 7 * size_m).to(tl.pointer_type(tl.float32)),
        scratch_ptr + 8 * size_m,
    )


@triton.jit
def context_token(token_ids_ptr, contexts_ptr, node, i: tl.constexpr, mask, CONTEXT: tl.constexpr):
    """The i-th token before a child of ``node``, nearest first: the node's own token, then its context."""
    if i == 0:
        return tl.load(token_ids_ptr + node, mask=mask, other=-1)
    else:
        return tl.load(contexts_ptr + node * CONTEXT + (i - 1), mask=mask, other=-1)


@triton.jit
def prune(
    level,  # pointers: frontier int32 [W], tokens int32 [W, K], log-probabilities float32 [W, K]
    nodes,  # of graph_of
    given,
    width,
    log_sibling_ratio,
    capacity,
    branch,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Drop what is absent, too improbable beside the best sibling, or a repeated sibling: its score is −inf.

    Writes ``given``; returns the frontier's nodes int32 [W], −1 for padding.
    """
    frontier_ptr, cand_tokens_ptr, cand_log_probs_ptr = level
    _, _, _, scores_ptr, _, _, _ = nodes
    origin_at, token_at, log_prob_at, score_at = given
    i = tl.arange(0, BLOCK_W)
    r = tl.arange(0, BLOCK_K)
    in_w = i < width
    here = in_w[:, None] & (r < branch)[None, :]  # [W, K]
    cand = i[:, None] * branch + r[None, :]
    node = tl.load(frontier_ptr + i, mask=in_w, other=-1)  # [W]
    node = tl.where(node < capacity, node, -1)
    token = tl.load(cand_tokens_ptr + cand, mask=here, other=-1)
    log_prob = plain(tl.load(cand_log_probs_ptr + cand, mask=here, other=float("-inf")))
    threshold = tl.max(log_prob, 1) + log_sibling_ratio  # [W]
    present = (log_prob > float("-inf")) & (log_prob >= threshold[:, None]) & (token >= 0) & (node >= 0)[:, None]
    repeated = here & False
    for s in tl.range(0, branch - 1):
        sibling = tl.load(cand_tokens_ptr + i * branch + s, mask=in_w, other=-1)
        sibling_log_prob = plain(tl.load(cand_log_probs_ptr + i * branch + s, mask=in_w, other=float("-inf")))
        counts = (sibling_log_prob > float("-inf")) & (sibling_log_prob >= threshold)  # its token decides the rest
        repeated = repeated | ((token == sibling[:, None]) & counts[:, None] & (r > s)[None, :])
    present = present & ~repeated
    origin = tl.where(node >= 0, node, capacity)  # [W]; padding comes last among equals
    parent_score = tl.load(scores_ptr + node, mask=in_w & (node >= 0), other=0.0)
    score = tl.where(present, parent_score[:, None] + log_prob, float("-inf"))
    tl.store(origin_at + cand, tl.broadcast_to(origin[:, None], [BLOCK_W, BLOCK_K]), mask=here)
    tl.store(token_at + cand, token, mask=here)
    tl.store(log_prob_at + cand, log_prob, mask=here)
    tl.store(score_at + cand, score, mask=here)
    return node


@triton.jit
def rank(given, ranked, size_m, capacity, branch, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Order: score desc, parent id asc, rank asc. Reads ``given``, writes ``ranked``."""
    given_origin, given_token, given_log_prob, given_score = given
    origin_at, token_at, log_prob_at, score_at, edge_at = ranked
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    for m0 in tl.range(0, size_m, ROWS):
        m = m0 + rows
        in_m = m < size_m
        u = tl.load(given_origin + m, mask=in_m, other=0)
        my_score = tl.load(given_score + m, mask=in_m, other=0.0)
        place = tl.zeros([ROWS], tl.int32)
        for c0 in tl.range(0, size_m, COLUMNS):
            c = c0 + columns
            in_c = c < size_m
            other_u = tl.load(given_origin + c, mask=in_c, other=0)[None, :]
            other_score = tl.load(given_score + c, mask=in_c, other=0.0)[None, :]
            # Equal parents: the candidates of one node, or padding, in the order they came in.
            first = (other_u < u[:, None]) | ((other_u == u[:, None]) & (c[None, :] < m[:, None]))
            before = (other_score > my_score[:, None]) | ((other_score == my_score[:, None]) & first)
            place += tl.sum((before & in_c[None, :]).to(tl.int32), 1)
        is_real = u < capacity
        tl.store(origin_at + place, tl.where(is_real, u, 0), mask=in_m)
        tl.store(token_at + place, tl.load(given_token + m, mask=in_m, other=-1), mask=in_m)
        tl.store(log_prob_at + place, tl.load(given_log_prob + m, mask=in_m, other=0.0), mask=in_m)
        tl.store(score_at + place, my_score, mask=in_m)
        tl.store(edge_at + place, tl.where(is_real, u * branch + m % branch, -1), mask=in_m)


@triton.jit
def join_nodes(
    nodes,
    num_nodes,
    ranked,
    joined_at,
    size_m,
    merge_context,
    capacity,
    CONTEXT: tl.constexpr,
    MERGING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Join an existing node: longest agreeing context, best score, lowest id.

    Reads ``ranked``, writes ``joined_at``: the node; −1: fresh; capacity: absent.
    """
    token_ids_ptr, _, _, scores_ptr, contexts_ptr, _, _ = nodes
    origin_at, token_at, _, score_at, _ = ranked
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    for m0 in tl.range(0, size_m, ROWS):
        m = m0 + rows
        in_m = m < size_m
        u = tl.load(origin_at + m, mask=in_m, other=0)
        my_token = tl.load(token_at + m, mask=in_m, other=-1)
        present_m = tl.load(score_at + m, mask=in_m, other=float("-inf")) > float("-inf")
        joined = tl.full([ROWS], -1, tl.int32)
        if MERGING:
            best_agreement = tl.full([ROWS], -1, tl.int32)
            best_score = tl.full([ROWS], float("-inf"), tl.float32)
            for n0 in tl.range(0, num_nodes, COLUMNS):
                n = n0 + columns
                in_n = n < num_nodes
                node_token = tl.load(token_ids_ptr + n, mask=in_n, other=-2)
                joinable = present_m[:, None] & in_n[None, :] & (n[None, :] > u[:, None])
                joinable = joinable & (my_token[:, None] == node_token[None, :])
                agreement = tl.zeros([ROWS, COLUMNS], tl.int32)
                agrees = joinable
                for t in tl.static_range(CONTEXT):
                    mine = context_token(token_ids_ptr, contexts_ptr, u, t, present_m, CONTEXT)
                    theirs = tl.load(contexts_ptr + n * CONTEXT + t, mask=in_n, other=-1)
                    agrees = agrees & (mine[:, None] == theirs[None, :]) & (mine >= 0)[:, None]
                    agreement += agrees.to(tl.int32)
                joinable = joinable & (agreement >= merge_context)
                longest = tl.max(tl.where(joinable, agreement, -1), 1)
                joinable = joinable & (agreement == longest[:, None])
                node_score = tl.load(scores_ptr + n, mask=in_n, other=float("-inf"))[None, :]
                top = tl.max(tl.where(joinable, node_score, float("-inf")), 1)
                joinable = joinable & (node_score == top[:, None])
                lowest = tl.min(tl.where(joinable, n[None, :], capacity), 1)
                better = (longest > best_agreement) | ((longest == best_agreement) & (top > best_score))
                better = better & (longest >= 0)  # ties stay with the earlier columns: lower ids
                joined = tl.where(better, lowest, joined)
                best_score = tl.where(better, top, best_score)
                best_agreement = tl.where(better, longest, best_agreement)
        tl.store(joined_at + m, tl.where(present_m, joined, capacity), mask=in_m)


@triton.jit
def find_leaders(
    nodes,
    ranked,
    joined_at,
    leader_at,
    size_m,
    merge_context,
    CONTEXT: tl.constexpr,
    MERGING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Of the fresh ones, find the first with a given token and context: it becomes a node and the others join it.

    Reads ``ranked`` and ``joined_at``, writes ``leader_at``: a place in the order, its own for who leads.
    """
    token_ids_ptr, _, _, _, contexts_ptr, _, _ = nodes
    origin_at, token_at, _, _, _ = ranked
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    for m0 in tl.range(0, size_m, ROWS):
        m = m0 + rows
        in_m = m < size_m
        leader = m
        if MERGING:
            u = tl.load(origin_at + m, mask=in_m, other=0)
            my_token = tl.load(token_at + m, mask=in_m, other=-1)
            fresh_m = tl.load(joined_at + m, mask=in_m, other=0) < 0
            for c0 in tl.range(0, size_m, COLUMNS):
                c = c0 + columns
                in_c = c < size_m
                other_u = tl.load(origin_at + c, mask=in_c, other=0)
                other_token = tl.load(token_at + c, mask=in_c, other=-2)
                other_fresh = tl.load(joined_at + c, mask=in_c, other=0) < 0
                alike = fresh_m[:, None] & other_fresh[None, :] & (my_token[:, None] == other_token[None, :])
                agreement = tl.zeros([ROWS, COLUMNS], tl.int32)
                agrees = alike
                for t in tl.static_range(CONTEXT):
                    mine = context_token(token_ids_ptr, contexts_ptr, u, t, in_m, CONTEXT)
                    theirs = context_token(token_ids_ptr, contexts_ptr, other_u, t, in_c, CONTEXT)
                    agrees = agrees & (mine[:, None] == theirs[None, :]) & (mine >= 0)[:, None]
                    agreement += agrees.to(tl.int32)
                alike = alike & (agreement >= merge_context)
                leader = tl.minimum(leader, tl.min(tl.where(alike, c[None, :], BLOCK_M), 1))
        tl.store(leader_at + m, leader, mask=in_m)
