"""Merging, as a specification: every candidate of the level at once, nothing sequential.

Shapes: B sequences, N nodes, W expanded nodes with K candidates each, M = W·K, C tokens of context.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...config import MAX_CONTEXT
from ...graph import WORD_BITS, Frontier, TokenGraph, pack_bits

NEG_INF = float("-inf")


class Candidates(NamedTuple):
    """The level's candidates in order: score desc, parent id asc, rank asc."""

    order: Tensor  # [B, M]: place of each in [W, K]
    exists: Tensor  # bool [B, M]: not pruned
    tokens: Tensor  # [B, M]
    scores: Tensor  # [B, M]
    depths: Tensor  # [B, M]
    origins: Tensor  # [B, M]: node u that the candidate follows
    contexts: Tensor  # [B, M, C]: u's token and those before it, nearest first, −1 where the text begins


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
    log_probs, present = _prune(frontier, cand_tokens, cand_log_probs, log_sibling_ratio)
    candidates = _in_order(graph, frontier, cand_tokens, log_probs, present)
    joins, joined = _existing_nodes(graph, candidates, merge_context)
    leads, targets = _new_nodes(graph, candidates, joins, joined, merge_context)
    _write_nodes(graph, candidates, leads)
    _write_edges(graph, frontier, candidates, targets, log_probs)
    return _next_frontier(graph, level, width, log_min_prob)


def _prune(
    frontier: Tensor, cand_tokens: Tensor, cand_log_probs: Tensor, log_sibling_ratio: float
) -> tuple[Tensor, Tensor]:
    """Step 1. A candidate is absent, or too improbable beside its best sibling, or repeats a sibling's token.

    Returns:
        Cleaned log-probabilities and which candidates are left, [B, W, K] each.
    """
    k = cand_tokens.shape[2]
    # NaN → −inf, above 0 → 0, −0 → +0
    log_probs = torch.where(cand_log_probs > NEG_INF, cand_log_probs.clamp(max=0.0) + 0.0, NEG_INF)
    threshold = log_probs.amax(-1, keepdim=True) + log_sibling_ratio
    present = (log_probs > NEG_INF) & (log_probs >= threshold) & (cand_tokens >= 0) & (frontier >= 0)[:, :, None]
    same_sibling = (cand_tokens[:, :, :, None] == cand_tokens[:, :, None, :]) & present[:, :, None, :]
    earlier = torch.ones(k, k, dtype=torch.bool, device=frontier.device).tril(-1)
    return log_probs, present & ~(same_sibling & earlier).any(-1)


def _in_order(
    graph: TokenGraph, frontier: Tensor, cand_tokens: Tensor, log_probs: Tensor, present: Tensor
) -> Candidates:
    """Step 2. Candidates in order: score desc, parent id asc, rank asc."""
    k = cand_tokens.shape[2]
    parent = frontier.long().clamp(min=0)  # [B, W]
    scores = torch.where(present, graph.scores.gather(1, parent)[:, :, None] + log_probs, NEG_INF)  # [B, W, K]
    by_parent = torch.where(frontier >= 0, parent, graph.capacity).argsort(dim=1, stable=True)  # [B, W]
    ranks = torch.arange(k, device=frontier.device)
    order = (by_parent[:, :, None] * k + ranks).flatten(1)  # [B, M]
    order = order.gather(1, scores.flatten(1).gather(1, order).argsort(dim=1, descending=True, stable=True))

    def in_order(x: Tensor) -> Tensor:  # [B, W, K] → [B, M]
        return x.flatten(1).gather(1, order)

    origins = parent.gather(1, order // k)
    contexts = torch.cat([graph.token_ids[:, :, None], graph.contexts[:, :, :-1]], -1)  # [B, N, C]: seen from a child
    return Candidates(
        order=order,
        exists=in_order(present),
        tokens=in_order(cand_tokens),
        scores=in_order(scores),
        depths=graph.depths.gather(1, origins) + 1,
        origins=origins,
        contexts=contexts.gather(1, origins[:, :, None].expand(-1, -1, MAX_CONTEXT)),
    )


def _existing_nodes(graph: TokenGraph, candidates: Candidates, merge_context: int) -> tuple[Tensor, Tensor]:
    """Step 3. Join an existing node: same token, context agrees, newer than u. Longest context, best score, lowest id.

    Returns:
        Which candidates join one, and which node that is, [B, M] each.
    """
    tokens, contexts = candidates.tokens, candidates.contexts
    nodes = torch.arange(graph.capacity, device=tokens.device)  # [N]
    agree = (contexts[:, :, None] == graph.contexts[:, None]) & (contexts >= 0)[:, :, None]  # [B, M, N, C]
    agreement = agree.to(torch.int32).cumprod(-1).sum(-1)  # [B, M, N]: leading tokens in common
    joinable = (
        candidates.exists[:, :, None]
        & (tokens[:, :, None] == graph.token_ids[:, None])
        & (nodes > candidates.origins[:, :, None])
        & (nodes < graph.num_nodes[:, None, None])
        & (agreement >= merge_context)
        & (merge_context >= 0)
    )
    joinable = _keep_best(joinable, agreement.float())
    joinable = _keep_best(joinable, graph.scores[:, None].expand_as(agreement))
    return joinable.any(-1), joinable.to(torch.int32).argmax(-1)  # lowest id of those left


def _new_nodes(
    graph: TokenGraph, candidates: Candidates, joins: Tensor, joined: Tensor, merge_context: int
) -> tuple[Tensor, Tensor]:
    """Step 4. Of the rest, the first with a given token and context becomes a node and the others join it.

    Returns:
        Which candidates become nodes, and the node of every candidate, −1 for none, [B, M] each.
    """
    tokens, contexts, m = candidates.tokens, candidates.contexts, candidates.tokens.shape[1]
    fresh = candidates.exists & ~joins
    shared = (contexts[:, :, None] == contexts[:, None]) & (contexts >= 0)[:, :, None]  # [B, M, M, C]
    alike = shared[..., : max(merge_context, 0)].all(-1) & (merge_context >= 0)
    alike = alike & (tokens[:, :, None] == tokens[:, None]) & fresh[:, :, None] & fresh[:, None]
    alike |= torch.eye(m, dtype=torch.bool, device=tokens.device)
    leader = alike.to(torch.int32).argmax(-1)  # [B, M]: first in order
    leads = fresh & (leader == torch.arange(m, device=tokens.device))
    new_id = graph.num_nodes[:, None] + leads.cumsum(1) - 1  # valid where leads
    target = torch.where(joins, joined, new_id.gather(1, leader))
    return leads, torch.where(candidates.exists, target, -1)


def _write_nodes(graph: TokenGraph, candidates: Candidates, leads: Tensor) -> None:
    """Step 5. Write the nodes: node n is the (n − num_nodes)-th leader."""
    count = leads.sum(1)  # [B]
    leader_order = leads.to(torch.int8).argsort(dim=1, descending=True, stable=True)  # [B, M]
    nth = torch.arange(graph.capacity, device=leads.device) - graph.num_nodes[:, None]  # [B, N]
    is_new = (nth >= 0) & (nth < count[:, None])
    source = leader_order.gather(1, nth.clamp(0, leads.shape[1] - 1).long())  # [B, N]

    def write(storage: Tensor, value: Tensor) -> None:  # value [B, M, …]
        index, new = source, is_new
        if value.dim() == 3:
            index, new = source[:, :, None].expand(-1, -1, value.shape[2]), is_new[:, :, None]
        storage.copy_(torch.where(new, value.gather(1, index).to(storage.dtype), storage))

    write(graph.token_ids, candidates.tokens)
    write(graph.parents, candidates.origins)
    write(graph.depths, candidates.depths)
    write(graph.scores, candidates.scores)
    write(graph.contexts, candidates.contexts)
    graph.num_nodes.add_(count)
    graph.num_merges.add_((candidates.exists & ~leads).sum(1))


def _write_edges(
    graph: TokenGraph, frontier: Tensor, candidates: Candidates, targets: Tensor, log_probs: Tensor
) -> None:
    """Step 6. Write the edges of the expanded nodes, in candidate order."""
    k = log_probs.shape[2]
    nodes = torch.arange(graph.capacity, device=frontier.device)
    edges = targets.gather(1, candidates.order.argsort(dim=1)).view_as(log_probs)  # [B, W, K]
    kept_log_probs = torch.where(edges >= 0, log_probs, 0.0)
    expanding = (frontier[:, None, :] == nodes[:, None]).to(torch.int32)  # [B, N, W]
    at = expanding.argmax(-1)[:, :, None].expand(-1, -1, k)  # [B, N, K]
    expanded_now = expanding.any(-1)  # [B, N]
    graph.edge_targets.copy_(
        torch.where(expanded_now[:, :, None], edges.gather(1, at), graph.edge_targets).to(torch.int32)
    )
    graph.edge_log_probs.copy_(
        torch.where(expanded_now[:, :, None], kept_log_probs.gather(1, at), graph.edge_log_probs)
    )
    graph.expanded.logical_or_(expanded_now)


def _next_frontier(graph: TokenGraph, level: int, width: int, log_min_prob: float) -> Frontier:
    """Step 7. The next frontier: the best unexpanded nodes. Stable, so equal scores go to the lower id."""
    device, words = graph.scores.device, graph.ancestor_mask.shape[-1]
    nodes = torch.arange(graph.capacity, device=device)
    eligible = (nodes < graph.num_nodes[:, None]) & ~graph.expanded & (graph.scores >= log_min_prob)
    ranked, best = torch.where(eligible, graph.scores, NEG_INF).sort(dim=1, descending=True, stable=True)
    ranked, best = _pad_to(ranked, width, NEG_INF), _pad_to(best, width, 0)
    valid = ranked > NEG_INF  # [B, width]
    slot = level * width + torch.arange(width, device=device)
    own = pack_bits(slot[:, None] == torch.arange(words * WORD_BITS, device=device))  # [width, words]
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
