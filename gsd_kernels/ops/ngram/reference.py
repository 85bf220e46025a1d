from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .api import NgramTable

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


def slots_of(keys: Tensor, capacity: int) -> Tensor:
    return (keys >> 17) & (capacity - 1)


def ngram_insert(table: NgramTable, contexts: Tensor, tokens: Tensor, log_probs: Tensor, valid: Tensor) -> None:
    """Entries that meet in a slot: the last one wins, whole, and all of them write it."""
    keys = context_keys(contexts, table.max_context) * valid[..., None]  # [B, M, L]
    entries = keys.flatten(1)  # [B, M·L]
    spare = table.keys.shape[1] - 1  # the last slot takes what is not kept
    slot = torch.where(entries != 0, slots_of(entries, spare), spare)
    number = torch.arange(entries.shape[1], device=keys.device).expand_as(entries)
    winner = torch.zeros_like(table.keys).scatter_reduce(1, slot, number, "amax").gather(1, slot)  # [B, M·L]
    row = (winner // table.max_context)[..., None].expand(-1, -1, tokens.shape[2])
    at = slot[..., None].expand_as(row)
    table.keys.scatter_(1, slot, entries.gather(1, winner))
    table.keys[:, spare].zero_()
    table.tokens.scatter_(1, at, tokens.gather(1, row))
    table.log_probs.scatter_(1, at, log_probs.gather(1, row))


def ngram_lookup(table: NgramTable, contexts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys = context_keys(contexts, table.max_context)  # [B, W, L]
    slot = slots_of(keys, table.keys.shape[1] - 1)
    found = (table.keys.gather(1, slot.flatten(1)).view_as(keys) == keys) & (keys != 0)
    lengths = torch.arange(1, table.max_context + 1, device=keys.device)
    matched = (found * lengths).amax(-1)  # [B, W]
    best = slot.gather(2, (matched - 1).clamp(min=0)[..., None])  # [B, W, 1]
    at = best.expand(-1, -1, table.tokens.shape[2])
    known = (matched > 0)[..., None]
    tokens = torch.where(known, table.tokens.gather(1, at), -1)
    log_probs = torch.where(known, table.log_probs.gather(1, at), float("-inf"))
    return tokens, log_probs, matched.to(torch.int32)


def mix_candidates(
    tokens: Tensor, log_probs: Tensor, other_tokens: Tensor, other_log_probs: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    w = weight[..., None]  # [B, W, 1]
    ours = torch.where(tokens >= 0, log_probs.exp() * (1.0 - w), 0.0)
    theirs = torch.where(other_tokens >= 0, other_log_probs.exp() * w, 0.0)
    same = (tokens[..., :, None] == other_tokens[..., None, :]) & (other_tokens >= 0)[..., None, :]  # [B, W, K, K']
    ours = ours + torch.where(same, theirs[..., None, :], 0.0).sum(-1)
    theirs = torch.where(same.any(-2), 0.0, theirs)
    probs, best = torch.cat([ours, theirs], -1).sort(stable=True, dim=-1, descending=True)
    k = tokens.shape[-1]
    mixed = torch.cat([tokens, other_tokens], -1).gather(-1, best)
    return torch.where(probs == 0, -1, mixed)[..., :k], probs[..., :k].log()
