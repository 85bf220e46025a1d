from __future__ import annotations

import torch
from torch import Tensor

from ...graph import Acceptance, Rows, unpack_bits


def verify(rows: Rows, sampled: Tensor, eos_ids: Tensor, remaining: Tensor, done: Tensor, max_path: int) -> Acceptance:
    """A row is accepted when it and all its ancestors are what the target picked at their parents."""
    num_rows = sampled.shape[1]
    places = torch.arange(num_rows, device=sampled.device)
    real = places < rows.num_rows[:, None]  # [B, R]
    picked = sampled.gather(1, rows.parent_rows.clamp(min=0).long())  # [B, R]: the target's token at the parent
    ends = (picked[:, :, None] == eos_ids).any(-1)
    agrees = (places == 0) | (
        real & (rows.parent_rows >= 0) & (picked == rows.token_ids) & ~ends & (rows.depths < remaining[:, None])
    )
    path = unpack_bits(rows.ancestor_mask, num_rows)  # [B, R, R]
    accepted = (agrees[:, None] | ~path).all(-1) & real & ~done[:, None]  # [B, R]: one path, no equal siblings

    levels = torch.arange(max_path + 1, device=sampled.device)
    at_level = accepted[:, None] & (rows.depths[:, None] == levels[:, None])  # [B, max_path + 1, R]
    accepted_rows = torch.where(at_level.any(-1), at_level.to(torch.int32).argmax(-1), -1)
    num_accepted = (accepted_rows >= 0).to(torch.int32).cumprod(1).sum(1)
    last = accepted_rows.gather(1, (num_accepted - 1).clamp(min=0)[:, None]).clamp(min=0)
    return Acceptance(
        accepted_rows=accepted_rows.to(torch.int32),
        num_accepted=num_accepted.to(torch.int32),
        next_token=sampled.gather(1, last).squeeze(1),
    )
