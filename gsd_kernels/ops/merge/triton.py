"""Merging of one drafted level in one launch, one program per sequence.

The steps are those of ``reference.py``. Candidates are ranked by counting, for each, how many come before it in the
total order: no sort, and ties cannot depend on the hardware. Comparisons of all pairs run over tiles of ``ROWS`` by
``COLUMNS``: with whole columns of 512 candidates the contexts alone would overflow the registers. Between the steps
the candidates lie in scratch memory, 48 bytes each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...config import MAX_CONTEXT
from ...graph import Frontier, TokenGraph

ROWS = 64
COLUMNS = 16


@triton.jit
def _context_token(token_ids_ptr, contexts_ptr, node, i: tl.constexpr, mask, CONTEXT: tl.constexpr):
    """The i-th token before a child of ``node``, nearest first: the node's own token, then its context."""
    if i == 0:
        return tl.load(token_ids_ptr + node, mask=mask, other=-1)
    else:
        return tl.load(contexts_ptr + node * CONTEXT + (i - 1), mask=mask, other=-1)


@triton.jit
def _open_score(scores_ptr, expanded_ptr, n, num_nodes, log_min_prob):
    """Scores of the nodes that may be expanded, −inf for the others."""
    inside = n < num_nodes
    score = tl.load(scores_ptr + n, mask=inside, other=float("-inf"))
    expanded = tl.load(expanded_ptr + n, mask=inside, other=1)
    return tl.where((expanded == 0) & (score >= log_min_prob), score, float("-inf"))


@triton.jit
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
    next_nodes_ptr,  # int32 [B, NEXT]
    next_tokens_ptr,
    next_depths_ptr,
    next_mask_ptr,  # int32 [B, NEXT, words]
    log_sibling_ratio,
    log_min_prob,
    merge_context,
    first_slot,
    width,
    NODES: tl.constexpr,
    BRANCH: tl.constexpr,
    CONTEXT: tl.constexpr,
    WORDS: tl.constexpr,
    NEXT: tl.constexpr,
    MERGING: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,  # candidates
    BLOCK_NEXT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    token_ids_ptr += b * NODES
    parents_ptr += b * NODES
    depths_ptr += b * NODES
    scores_ptr += b * NODES
    contexts_ptr += b * NODES * CONTEXT
    expanded_ptr += b * NODES
    ancestor_mask_ptr += b * NODES * WORDS
    edge_targets_ptr += b * NODES * BRANCH
    edge_log_probs_ptr += b * NODES * BRANCH
    size_m = width * BRANCH
    frontier_ptr += b * width
    cand_tokens_ptr += b * size_m
    cand_log_probs_ptr += b * size_m
    scratch_ptr += b * 12 * size_m
    # As the candidates came in: parent node, token, bits of log-probability and score.
    given_origin, given_token = scratch_ptr, scratch_ptr + size_m
    given_log_prob = (scratch_ptr + 2 * size_m).to(tl.pointer_type(tl.float32))
    given_score = (scratch_ptr + 3 * size_m).to(tl.pointer_type(tl.float32))
    # The same in order, with the place of the edge, the node joined, whether fresh, the leader and the new node's id.
    origin_at, token_at = scratch_ptr + 4 * size_m, scratch_ptr + 5 * size_m
    log_prob_at = (scratch_ptr + 6 * size_m).to(tl.pointer_type(tl.float32))
    score_at = (scratch_ptr + 7 * size_m).to(tl.pointer_type(tl.float32))
    edge_at, joined_at = scratch_ptr + 8 * size_m, scratch_ptr + 9 * size_m
    leader_at, new_id_at = scratch_ptr + 10 * size_m, scratch_ptr + 11 * size_m
    num_nodes = tl.load(num_nodes_ptr + b)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)

    # 1. Prune: absent, too improbable beside the best sibling, or a repeated sibling.
    i = tl.arange(0, BLOCK_W)
    r = tl.arange(0, BLOCK_K)
    in_w = i < width
    here = in_w[:, None] & (r < BRANCH)[None, :]  # [W, K]
    cand = i[:, None] * BRANCH + r[None, :]
    node = tl.load(frontier_ptr + i, mask=in_w, other=-1)  # [W]
    token = tl.load(cand_tokens_ptr + cand, mask=here, other=-1)
    raw = tl.load(cand_log_probs_ptr + cand, mask=here, other=float("-inf"))
    log_prob = tl.where(raw > float("-inf"), raw + 0.0, float("-inf"))  # NaN → −inf, −0 → +0
    threshold = tl.max(log_prob, 1) + log_sibling_ratio  # [W]
    present = (log_prob > float("-inf")) & (log_prob >= threshold[:, None]) & (token >= 0) & (node >= 0)[:, None]
    repeated = here & False
    for s in tl.static_range(BRANCH - 1):
        sibling = tl.load(cand_tokens_ptr + i * BRANCH + s, mask=in_w, other=-1)
        sibling_raw = tl.load(cand_log_probs_ptr + i * BRANCH + s, mask=in_w, other=float("-inf"))
        sibling_log_prob = tl.where(sibling_raw > float("-inf"), sibling_raw + 0.0, float("-inf"))
        counts = (sibling_log_prob > float("-inf")) & (sibling_log_prob >= threshold)  # its token decides the rest
        repeated = repeated | ((token == sibling[:, None]) & counts[:, None] & (r > s)[None, :])
    present = present & ~repeated
    origin = tl.where(node >= 0, node, NODES)  # [W]; padding comes last among equals
    parent_score = tl.load(scores_ptr + node, mask=in_w & (node >= 0), other=0.0)
    score = tl.where(present, parent_score[:, None] + log_prob, float("-inf"))

    tl.store(given_origin + cand, tl.broadcast_to(origin[:, None], [BLOCK_W, BLOCK_K]), mask=here)
    tl.store(given_token + cand, token, mask=here)
    tl.store(given_log_prob + cand, log_prob, mask=here)
    tl.store(given_score + cand, score, mask=here)
    tl.debug_barrier()

    # 2. Order: score desc, parent id asc, rank asc.
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
        is_real = u < NODES
        tl.store(origin_at + place, tl.where(is_real, u, 0), mask=in_m)
        tl.store(token_at + place, tl.load(given_token + m, mask=in_m, other=-1), mask=in_m)
        tl.store(log_prob_at + place, tl.load(given_log_prob + m, mask=in_m, other=0.0), mask=in_m)
        tl.store(score_at + place, my_score, mask=in_m)
        tl.store(edge_at + place, tl.where(is_real, u * BRANCH + m % BRANCH, -1), mask=in_m)
    tl.debug_barrier()

    # 3. Join an existing node: longest agreeing context, best score, lowest id.
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
                    mine = _context_token(token_ids_ptr, contexts_ptr, u, t, present_m, CONTEXT)
                    theirs = tl.load(contexts_ptr + n * CONTEXT + t, mask=in_n, other=-1)
                    agrees = agrees & (mine[:, None] == theirs[None, :]) & (mine >= 0)[:, None]
                    agreement += agrees.to(tl.int32)
                joinable = joinable & (agreement >= merge_context)
                longest = tl.max(tl.where(joinable, agreement, -1), 1)
                joinable = joinable & (agreement == longest[:, None])
                node_score = tl.load(scores_ptr + n, mask=in_n, other=float("-inf"))[None, :]
                top = tl.max(tl.where(joinable, node_score, float("-inf")), 1)
                joinable = joinable & (node_score == top[:, None])
                lowest = tl.min(tl.where(joinable, n[None, :], NODES), 1)
                better = (longest > best_agreement) | ((longest == best_agreement) & (top > best_score))
                better = better & (longest >= 0)  # ties stay with the earlier columns: lower ids
                joined = tl.where(better, lowest, joined)
                best_score = tl.where(better, top, best_score)
                best_agreement = tl.where(better, longest, best_agreement)
        tl.store(joined_at + m, tl.where(present_m, joined, NODES), mask=in_m)  # fresh: −1; absent: NODES
    tl.debug_barrier()

    # 4. Of the rest, the first with a given token and context becomes a node and the others join it.
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
                    mine = _context_token(token_ids_ptr, contexts_ptr, u, t, in_m, CONTEXT)
                    theirs = _context_token(token_ids_ptr, contexts_ptr, other_u, t, in_c, CONTEXT)
                    agrees = agrees & (mine[:, None] == theirs[None, :]) & (mine >= 0)[:, None]
                    agreement += agrees.to(tl.int32)
                alike = alike & (agreement >= merge_context)
                leader = tl.minimum(leader, tl.min(tl.where(alike, c[None, :], BLOCK_M), 1))
        tl.store(leader_at + m, leader, mask=in_m)
    tl.debug_barrier()
    m = tl.arange(0, BLOCK_M)
    in_m = m < size_m
    u = tl.load(origin_at + m, mask=in_m, other=0)
    token = tl.load(token_at + m, mask=in_m, other=-1)
    score = tl.load(score_at + m, mask=in_m, other=float("-inf"))
    log_prob = tl.load(log_prob_at + m, mask=in_m, other=0.0)
    edge = tl.load(edge_at + m, mask=in_m, other=-1)
    joined = tl.load(joined_at + m, mask=in_m, other=NODES)
    leader = tl.load(leader_at + m, mask=in_m, other=0)
    exists = joined < NODES
    leads = (joined < 0) & (leader == m)
    new_id = num_nodes + tl.cumsum(leads.to(tl.int32), 0) - 1
    tl.store(new_id_at + m, new_id, mask=in_m)
    tl.debug_barrier()
    followed = tl.load(new_id_at + leader, mask=in_m, other=-1)
    target = tl.where(exists, tl.where(joined >= 0, joined, followed), -1)

    # 5. The nodes.
    writes = leads & (new_id < NODES)
    tl.store(token_ids_ptr + new_id, token, mask=writes)
    tl.store(parents_ptr + new_id, u, mask=writes)
    tl.store(depths_ptr + new_id, tl.load(depths_ptr + u, mask=exists, other=0) + 1, mask=writes)
    tl.store(scores_ptr + new_id, score, mask=writes)
    for t in tl.static_range(CONTEXT):
        mine = _context_token(token_ids_ptr, contexts_ptr, u, t, exists, CONTEXT)
        tl.store(contexts_ptr + new_id * CONTEXT + t, mine, mask=writes)
    num_nodes += tl.sum(leads.to(tl.int32), 0)

    # 6. The edges, in the candidates' own order.
    tl.store(edge_targets_ptr + edge, target, mask=in_m & (edge >= 0))
    tl.store(edge_log_probs_ptr + edge, tl.where(target >= 0, log_prob, 0.0), mask=in_m & (edge >= 0))
    tl.store(expanded_ptr + node, tl.full([BLOCK_W], 1, tl.uint8), mask=node >= 0)
    tl.debug_barrier()  # the nodes are read again below

    # 7. The next frontier: the best unexpanded nodes, ordered like the candidates.
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
        chosen = is_open & (place < NEXT)
        out = b * NEXT + place
        tl.store(next_nodes_ptr + out, n, mask=chosen)
        tl.store(next_tokens_ptr + out, tl.load(token_ids_ptr + n, mask=chosen, other=0), mask=chosen)
        tl.store(next_depths_ptr + out, tl.load(depths_ptr + n, mask=chosen, other=0), mask=chosen)
        # A chosen node's parent is expanded, hence not chosen itself: no mask is read after it is written.
        up = tl.maximum(tl.load(parents_ptr + n, mask=chosen, other=0), 0)
        for w in tl.range(0, WORDS):
            own = tl.where((first_slot + place) // 32 == w, 1 << ((first_slot + place) % 32), 0)
            mask = tl.load(ancestor_mask_ptr + up * WORDS + w, mask=chosen, other=0) | own
            tl.store(ancestor_mask_ptr + n * WORDS + w, mask, mask=chosen)
            tl.store(next_mask_ptr + out * WORDS + w, mask, mask=chosen)
    p = tl.arange(0, BLOCK_NEXT)
    padding = (p >= open_nodes) & (p < NEXT)
    tl.store(next_nodes_ptr + b * NEXT + p, tl.full([BLOCK_NEXT], -1, tl.int32), mask=padding)
    tl.store(next_tokens_ptr + b * NEXT + p, tl.zeros([BLOCK_NEXT], tl.int32), mask=padding)
    tl.store(next_depths_ptr + b * NEXT + p, tl.full([BLOCK_NEXT], 1, tl.int32), mask=padding)
    for w in tl.range(0, WORDS):
        own_p = tl.where((first_slot + p) // 32 == w, 1 << ((first_slot + p) % 32), 0)
        tl.store(next_mask_ptr + (b * NEXT + p) * WORDS + w, own_p, mask=padding)
    tl.store(num_nodes_ptr + b, num_nodes)
    merges = tl.sum((exists & ~leads).to(tl.int32), 0)
    tl.store(num_merges_ptr + b, tl.load(num_merges_ptr + b) + merges)


def merge(
    graph: TokenGraph,
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
    batch, expanded, branch = cand_tokens.shape
    nodes, words, device = graph.capacity, graph.ancestor_mask.shape[-1], frontier.device
    block_w, block_k = triton.next_power_of_2(expanded), triton.next_power_of_2(branch)
    size_m = expanded * branch
    block_m = max(16, triton.next_power_of_2(size_m))

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
        NODES=nodes,
        BRANCH=branch,
        CONTEXT=MAX_CONTEXT,
        WORDS=words,
        NEXT=width,
        MERGING=merge_context >= 0,
        BLOCK_W=block_w,
        BLOCK_K=block_k,
        BLOCK_M=block_m,
        BLOCK_NEXT=triton.next_power_of_2(width),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4 if size_m <= ROWS else 8,
    )
    return result
