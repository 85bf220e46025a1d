from __future__ import annotations

import torch
from torch import Tensor

from ...graph import Rows, TokenGraph
from ..sampling.philox import gumbel_of
from .table import NgramTable

MEAN_GUMBEL = 0.5772
LEAST_REST = 1e-6
_MIX = -7046029254386353131  # 0x9E3779B97F4A7C15, 2**64 over the golden ratio


def context_keys(contexts: Tensor, max_context: int) -> Tensor:
    """int32 [B, M, C] → int64 [B, M, max_context]: a hash for every length, 0 where the context is too short."""
    key = torch.zeros_like(contexts[..., 0], dtype=torch.int64)
    keys = []
    for length in range(max_context):
        key = (key ^ (contexts[..., length].long() + 1)) * _MIX
        key = key ^ (key >> 29)
        keys.append(torch.where((contexts[..., : length + 1] >= 0).all(-1), (key + length) | 1, 0))
    return torch.stack(keys, -1)


def sets_of(keys: Tensor, num_sets: int) -> Tensor:
    return (keys >> 17) & (num_sets - 1)


def ngram_insert(table: NgramTable, contexts: Tensor, tokens: Tensor, log_probs: Tensor, valid: Tensor) -> None:
    """Every touched set is written anew: the call's entries, newest first, then what it held and still has room for."""
    ways, batch = table.ways, contexts.shape[0]
    num_sets = table.keys.shape[1] // ways
    given = context_keys(contexts, table.max_context) * valid[..., None]  # [B, M, L], 0 for none
    entries = given.flatten(1).flip(1)  # [B, E], newest first
    if entries.numel() == 0:
        return

    # Of equal keys the newest counts. A stable sort leaves it in front.
    by_key, order = entries.sort(dim=1, stable=True)
    newest = torch.nn.functional.pad(by_key[:, 1:] != by_key[:, :-1], (1, 0), value=True)
    counts = torch.zeros_like(newest).scatter(1, order, newest) & (entries != 0)

    # The counting entries of a set, newest first, are neighbours in `order`.
    home = sets_of(entries, num_sets)  # [B, E]
    by_set, order = torch.where(counts, home, num_sets).sort(dim=1, stable=True)
    first = torch.searchsorted(by_set, home)
    fresh = torch.searchsorted(by_set, home, right=True) - first  # [B, E]: counting entries of the entry's set

    # Of what the set held, in order, that stays which is not among them. Free ways hold 0 and come last.
    way = torch.arange(ways, device=entries.device)
    at = home[..., None] * ways + way  # [B, E, W]
    held = table.keys.gather(1, at.flatten(1))  # [B, E·W]
    place = torch.searchsorted(by_key, held).clamp(max=entries.shape[1] - 1)
    replaced = ((by_key.gather(1, place) == held) & (held != 0)).view_as(at)
    staying = replaced.to(torch.uint8).sort(dim=-1, stable=True).indices  # [B, E, W]

    is_fresh = way < fresh[..., None]  # [B, E, W]
    newcomer = order.gather(1, (first[..., None] + way).clamp(max=entries.shape[1] - 1).flatten(1))  # [B, E·W]
    stays = at.gather(2, staying.gather(2, (way - fresh[..., None]).clamp(min=0))).flatten(1)

    def rewrite(stored: Tensor, new: Tensor) -> None:
        """stored [B, capacity, …], new [B, E, …]. Entries of one set write the same values."""
        size = stored.shape[2:]
        pick = (batch, -1, *(1 for _ in size))
        index = [i.view(pick).expand(-1, -1, *size) for i in (newcomer, stays, at)]
        values = torch.where(is_fresh.view(pick), new.gather(1, index[0]), stored.gather(1, index[1]))
        stored.scatter_(1, index[2], values)

    rewrite(table.keys, entries)
    rewrite(table.tokens, tokens.repeat_interleave(table.max_context, 1).flip(1))
    rewrite(table.log_probs, log_probs.repeat_interleave(table.max_context, 1).flip(1))


def ngram_lookup(table: NgramTable, contexts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys = context_keys(contexts, table.max_context)  # [B, W, L]
    ways = torch.arange(table.ways, device=keys.device)
    at = sets_of(keys, table.keys.shape[1] // table.ways)[..., None] * table.ways + ways  # [B, W, L, ways]
    hit = (table.keys.gather(1, at.flatten(1)).view_as(at) == keys[..., None]) & (keys != 0)[..., None]
    lengths = torch.arange(1, table.max_context + 1, device=keys.device)
    matched = (hit.any(-1) * lengths).amax(-1)  # [B, W]
    longest = (matched - 1).clamp(min=0)[..., None, None].expand(-1, -1, 1, table.ways)
    way = hit.gather(2, longest).to(torch.uint8).argmax(-1, keepdim=True)  # [B, W, 1, 1]
    best = at.gather(2, longest).gather(3, way).flatten(2).expand(-1, -1, table.tokens.shape[2])
    known = (matched > 0)[..., None]
    tokens = torch.where(known, table.tokens.gather(1, best), -1)
    log_probs = torch.where(known, table.log_probs.gather(1, best), float("-inf"))
    return tokens, log_probs, matched.to(torch.int32)


def row_contexts(rows: Rows, tail: Tensor, length: int) -> Tensor:
    """The last ``length`` tokens at every row, its own first, running on into the emitted text.

    tail int32 [B, C]: the tokens before the root. Returns int32 [B, R, length].
    """
    at = torch.arange(rows.token_ids.shape[1], device=tail.device).expand_as(rows.token_ids)
    context = []
    for back in range(length):
        drafted = rows.token_ids.gather(1, at.clamp(min=0))
        emitted = tail.gather(1, (back - 1 - rows.depths).clamp(0, tail.shape[1] - 1).long())
        context.append(torch.where(at >= 0, drafted, emitted))
        at = torch.where(at >= 0, rows.parent_rows.gather(1, at.clamp(min=0)).long(), -1)
    return torch.stack(context, -1)


def real_rows(rows: Rows) -> Tensor:
    """Mark the rows that are no padding, bool [B, R]."""
    return torch.arange(rows.token_ids.shape[1], device=rows.num_rows.device) < rows.num_rows[:, None]


def node_contexts(graph: TokenGraph, nodes: Tensor) -> Tensor:
    """The last tokens at nodes, their own first: int32 [B, W, C]."""
    node = nodes.clamp(min=0).long()
    before = graph.contexts.gather(1, node[..., None].expand(-1, -1, graph.contexts.shape[2]))[..., :-1]
    return torch.cat([graph.token_ids.gather(1, node)[..., None], before], -1)


def pick_positions(graph: TokenGraph, nodes: Tensor, first_pick: Tensor) -> Tensor:
    """Index in the text of the token after nodes: int32 [B, W]."""
    return first_pick[:, None] + graph.depths.gather(1, nodes.clamp(min=0).long())


def weights_of(weight: Tensor, index: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """The weight of every row, float32 ``shape``, of its own or from a table [n]."""
    if weight.dim() == 2:
        return weight
    return weight[0].expand(shape) if index is None else weight[index.long().clamp(0, len(weight) - 1)]


def perturb_candidates(
    tokens: Tensor, log_probs: Tensor, positions: Tensor, seed: Tensor, sequence_ids: Tensor
) -> Tensor:
    noise = gumbel_of(seed, positions, sequence_ids[:, None], tokens)
    noisy = torch.where(tokens >= 0, log_probs + noise, float("-inf"))
    rest = (1.0 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST).log() + MEAN_GUMBEL
    return noisy - torch.cat([noisy, rest], -1).logsumexp(-1, keepdim=True)


def mix_candidates(
    tokens: Tensor,
    log_probs: Tensor,
    other_tokens: Tensor,
    other_log_probs: Tensor,
    weight: Tensor,
    index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    w = weights_of(weight, index, tokens.shape[:2])[..., None]  # [B, W, 1]
    ours = torch.where(tokens >= 0, log_probs.exp() * (1.0 - w), 0.0)
    theirs = torch.where(other_tokens >= 0, other_log_probs.exp() * w, 0.0)
    same = (tokens[..., :, None] == other_tokens[..., None, :]) & (other_tokens >= 0)[..., None, :]  # [B, W, K, K']
    ours = ours + torch.where(same, theirs[..., None, :], 0.0).sum(-1)
    theirs = torch.where(same.any(-2), 0.0, theirs)
    probs, best = torch.cat([ours, theirs], -1).sort(stable=True, dim=-1, descending=True)
    k = tokens.shape[-1]
    mixed = torch.cat([tokens, other_tokens], -1).gather(-1, best)
    return torch.where(probs == 0, -1, mixed)[..., :k], probs[..., :k].log()
