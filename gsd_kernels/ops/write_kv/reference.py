from __future__ import annotations

import torch
from torch import Tensor


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, positions: Tensor, spoiled: Tensor | None) -> None:
    sequence = torch.arange(positions.shape[0], device=positions.device)[:, None]
    for cache, rows in ((k_cache, k), (v_cache, v)):
        cache.transpose(1, 2)[sequence, positions] = rows.nan_to_num().transpose(1, 2)
        if spoiled is not None:
            spoiled.masked_fill_(~rows.isfinite().all(-1).all(1), float("nan"))
