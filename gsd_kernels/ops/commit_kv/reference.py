from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def commit_kv(
    k_caches: Sequence[Tensor], v_caches: Sequence[Tensor], accepted_rows: Tensor, num_accepted: Tensor, kv_len: Tensor
) -> None:
    """Gather all sources, then write. Padding copies a position onto itself."""
    batch, width = accepted_rows.shape
    place = torch.arange(width, device=accepted_rows.device)
    moves = place < num_accepted[:, None]
    source = kv_len[:, None] + torch.where(moves, accepted_rows.clamp(min=0), place)  # [B, P]
    target = kv_len[:, None] + place
    sequence = torch.arange(batch, device=accepted_rows.device)[:, None]
    for cache in (*k_caches, *v_caches):
        by_position = cache.transpose(1, 2)  # [B, S, Hkv, D]
        by_position[sequence, target] = by_position[sequence, source]  # advanced indexing copies before it writes
    kv_len.add_(num_accepted)
