"""Merging, as a specification: every candidate of the level at once, nothing sequential."""

from __future__ import annotations

import torch
from torch import Tensor

from ...config import MAX_CONTEXT
from ...graph import WORD_BITS, Frontier, TokenGraph, pack_bits

NEG_INF = float("-inf")


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
    batch, w, k = cand_tokens.shape
    nodes = torch.arange(graph.capacity, device=frontier.device)  # [N]
    parent = frontier.long().clamp(min=0)  # [B, W]

    # 1. Prune. A candidate is absent, or too improbable beside its best sibling, or repeats a sibling's token.
    log_probs = torch.where(cand_log_probs > NEG_INF, cand_log_probs + 0.0, NEG_INF)  # NaN → −inf, −0 → +0
    threshold = log_probs.amax(-1, keepdim=True) + log_sibling_ratio
    present = (log_probs > NEG_INF) & (log_probs >= threshold) & (cand_tokens >= 0) & (frontier >= 0)[:, :, None]
    same_sibling = (cand_tokens[:, :, :, None] == cand_tokens[:, :, None, :]) & present[:, :, None, :]
    earlier = torch.ones(k, k, dtype=torch.bool, device=frontier.device).tril(-1)
    present &= ~(same_sibling & earlier).any(-1)

    # 2. Candidates in order: score desc, parent id asc, rank asc.
    scores = torch.where(present, graph.scores.gather(1, parent)[:, :, None] + log_probs, NEG_INF)  # [B, W, K]
    by_parent = torch.where(frontier >= 0, parent, graph.capacity).argsort(dim=1, stable=True)  # [B, W]
    ranks = torch.arange(k, device=frontier.device)
    order = (by_parent[:, :, None] * k + ranks).flatten(1)  # [B, M], M = W·K
    order = order.gather(1, scores.flatten(1).gather(1, order).argsort(dim=1, descending=True, stable=True))

    def in_order(x: Tensor) -> Tensor:  # [B, W, K] → [B, M]
        return x.flatten(1).gather(1, order)

    tokens, score, exists = in_order(cand_tokens), in_order(scores), in_order(present)
    origin = parent.gather(1, order // k)  # [B, M]: node u that the candidate follows
    context = torch.cat([graph.token_ids[:, :, None], graph.contexts[:, :, :-1]], -1)  # [B, N, C]: seen from a child
    context = context.gather(1, origin[:, :, None].expand(-1, -1, MAX_CONTEXT))  # [B, M, C]
    depth = graph.depths.gather(1, origin) + 1

    # 3. Join an existing node: same token, context agrees, newer than u. Longest context, best score, lowest id.
    agree = (context[:, :, None] == graph.contexts[:, None]) & (context >= 0)[:, :, None]  # [B, M, N, C]
    agreement = agree.to(torch.int32).cumprod(-1).sum(-1)  # [B, M, N]: leading tokens in common
    joinable = (
        exists[:, :, None]
        & (tokens[:, :, None] == graph.token_ids[:, None])
        & (nodes > origin[:, :, None])
        & (nodes < graph.num_nodes[:, None, None])
        & (agreement >= merge_context)
        & (merge_context >= 0)
    )
    joinable = _keep_best(joinable, agreement.float())
    joinable = _keep_best(joinable, graph.scores[:, None].expand_as(agreement))
    joins = joinable.any(-1)
    joined = joinable.to(torch.int32).argmax(-1)  # lowest id of those left

    # 4. Of the rest, the first with a given token and context becomes a node and the others join it.
    fresh = exists & ~joins
    shared = (context[:, :, None] == context[:, None]) & (context >= 0)[:, :, None]  # [B, M, M, C]
    alike = shared[..., : max(merge_context, 0)].all(-1) & (merge_context >= 0)
    alike = alike & (tokens[:, :, None] == tokens[:, None]) & fresh[:, :, None] & fresh[:, None]
    alike |= torch.eye(w * k, dtype=torch.bool, device=frontier.device)
    leader = alike.to(torch.int32).argmax(-1)  # [B, M]: first in order
    leads = fresh & (leader == torch.arange(w * k, device=frontier.device))
    count = leads.sum(1)  # [B]
    new_id = graph.num_nodes[:, None] + leads.cumsum(1) - 1  # valid where leads
    target = torch.where(joins, joined, new_id.gather(1, leader))
    target = torch.where(exists, target, -1)  # [B, M]

    # 5. Write the nodes: node n is the (n − num_nodes)-th leader.
    leader_order = leads.to(torch.int8).argsort(dim=1, descending=True, stable=True)  # [B, M]
    nth = nodes - graph.num_nodes[:, None]  # [B, N]
    is_new = (nth >= 0) & (nth < count[:, None])
    source = leader_order.gather(1, nth.clamp(0, w * k - 1).long())  # [B, N]

    def write(storage: Tensor, value: Tensor) -> None:  # value [B, M, …]
        index, new = source, is_new
        if value.dim() == 3:
            index, new = source[:, :, None].expand(-1, -1, value.shape[2]), is_new[:, :, None]
        storage.copy_(torch.where(new, value.gather(1, index).to(storage.dtype), storage))

    write(graph.token_ids, tokens)
    write(graph.parents, origin)
    write(graph.depths, depth)
    write(graph.scores, score)
    write(graph.contexts, context)
    graph.num_nodes.add_(count)
    graph.num_merges.add_((exists & ~leads).sum(1))

    # 6. Write the edges of the expanded nodes, in candidate order.
    back = order.argsort(dim=1)
    edges = target.gather(1, back).view(batch, w, k)
    kept = edges >= 0
    expanding = (frontier[:, None, :] == nodes[:, None]).to(torch.int32)  # [B, N, W]
    at = expanding.argmax(-1)[:, :, None].expand(-1, -1, k)  # [B, N, K]
    expanded_now = expanding.any(-1)  # [B, N]
    graph.edge_targets.copy_(
        torch.where(expanded_now[:, :, None], edges.gather(1, at), graph.edge_targets).to(torch.int32)
    )
    kept_log_probs = torch.where(kept, log_probs, 0.0)
    graph.edge_log_probs.copy_(
        torch.where(expanded_now[:, :, None], kept_log_probs.gather(1, at), graph.edge_log_probs)
    )
    graph.expanded.logical_or_(expanded_now)

    # 7. The next frontier: the best unexpanded nodes. Stable, so equal scores go to the lower id.
    eligible = (nodes < graph.num_nodes[:, None]) & ~graph.expanded & (graph.scores >= log_min_prob)
    ranked, best = torch.where(eligible, graph.scores, NEG_INF).sort(dim=1, descending=True, stable=True)
    ranked, best = _pad_to(ranked, width, NEG_INF), _pad_to(best, width, 0)
    valid = ranked > NEG_INF  # [B, width]
    slot = level * width + torch.arange(width, device=frontier.device)
    words = graph.ancestor_mask.shape[-1]
    own = pack_bits(slot[:, None] == torch.arange(words * WORD_BITS, device=frontier.device))  # [width, words]
    up = graph.parents.gather(1, best).long().clamp(min=0)[:, :, None].expand(-1, -1, words)
    mask = torch.where(valid[:, :, None], graph.ancestor_mask.gather(1, up), 0) | own
    chosen = (best[:, None, :] == nodes[:, None]) & valid[:, None]  # [B, N, width]
    at = chosen.to(torch.int32).argmax(-1)[:, :, None].expand(-1, -1, words)
    graph.ancestor_mask.copy_(torch.where(chosen.any(-1)[:, :, None], mask.gather(1, at), graph.ancestor_mask))
    return Frontier(
        node_ids=torch.where(valid, best, -1).to(torch.int32),
        token_ids=torch.where(valid, graph.token_ids.gather(1, best), 0),
        depths=torch.where(valid, graph.depths.gather(1, best), 1),
        ancestor_mask=mask,
    )


def _keep_best(mask: Tensor, value: Tensor) -> Tensor:
    """Of the last dimension's marked entries, those with the largest ``value``."""
    value = torch.where(mask, value, NEG_INF)
    return mask & (value == value.amax(-1, keepdim=True))


def _pad_to(x: Tensor, width: int, fill: float) -> Tensor:
    return torch.nn.functional.pad(x, (0, max(0, width - x.shape[1])), value=fill)[:, :width]
