from __future__ import annotations

import torch
from torch import Tensor

from ...graph import Acceptance, unpack_bits


def verify(
    token_ids: Tensor,  # int32 [B, R], of the rows, as the next four
    parent_rows: Tensor,  # int32 [B, R]
    depths: Tensor,  # int32 [B, R]
    ancestor_mask: Tensor,  # int32 [B, R, words]
    num_rows: Tensor,  # int32 [B]
    sampled: Tensor,  # int32 [B, R]
    eos_ids: Tensor,  # int32 [E]
    remaining: Tensor,  # int32 [B]
    done: Tensor,  # bool [B]
    max_path: int,
) -> Acceptance:
    """A row is accepted when it and all its ancestors are what the target picked at their parents."""
    places = torch.arange(sampled.shape[1], device=sampled.device)
    real = places < num_rows[:, None]  # [B, R]
    picked = sampled.gather(1, parent_rows.clamp(min=0).long())  # [B, R]: the target's token at the parent
    ends = (picked[:, :, None] == eos_ids).any(-1)
    agrees = (places == 0) | (real & (parent_rows >= 0) & (picked == token_ids) & ~ends & (depths < remaining[:, None]))
    path = unpack_bits(ancestor_mask, sampled.shape[1])  # [B, R, R]
    accepted = (agrees[:, None] | ~path).all(-1) & real & ~done[:, None]  # [B, R]: one path, no equal siblings

    levels = torch.arange(max_path + 1, device=sampled.device)
    at_level = accepted[:, None] & (depths[:, None] == levels[:, None])  # [B, max_path + 1, R]
    accepted_rows = torch.where(at_level.any(-1), at_level.to(torch.int32).argmax(-1), -1)
    num_accepted = (accepted_rows >= 0).to(torch.int32).cumprod(1).sum(1)
    last = accepted_rows.gather(1, (num_accepted - 1).clamp(min=0)[:, None]).clamp(min=0)
    return Acceptance(
        accepted_rows=accepted_rows.to(torch.int32),
        num_accepted=num_accepted.to(torch.int32),
        next_token=sampled.gather(1, last).squeeze(1),
    )
