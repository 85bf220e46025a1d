from __future__ import annotations

import torch
from torch import Tensor

from .dense import DenseMask, dense_mask_of
from .records import AttentionCall


def dag_attention(
    call: AttentionCall,
    *,
    dense: DenseMask | None = None,  # computed from the words if not given
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the visible positions, in float32 (float64 for float64 inputs)."""
    visible = (dense_mask_of(call) if dense is None else dense).visible
    return attend(call.q, call.k, call.v, visible, call.scale, call.softcap, call.sinks)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [B, Hq, R, Dv] and log-sum-exp [B, Hq, R] for a dense mask [B, R, S]."""
    batch, heads, rows, _ = q.shape
    groups = heads // k.shape[1]
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(exact).unflatten(1, (k.shape[1], groups))  # [B, Hkv, G, R, D]
    scores = (grouped.flatten(2, 3) @ k.to(exact).mT).unflatten(2, (groups, rows)) * scale  # [B, Hkv, G, R, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = torch.where(visible[:, None, None], scores, float("-inf"))
    lse = scores.logsumexp(-1)  # [B, Hkv, G, R]
    weights = torch.where(visible[:, None, None], (scores - lse.unsqueeze(-1)).exp(), 0.0)
    out = (weights.flatten(2, 3) @ seen_values(v, visible).to(exact)).view(batch, heads, rows, -1)
    lse = lse.view(batch, heads, rows)
    if sinks is not None:
        out = out * share(lse, sinks)
    return out.to(q.dtype), lse.float()


def share(lse: Tensor, sinks: Tensor) -> Tensor:
    """The share that a head's sink [Hq] leaves to the visible positions: e^lse / (e^lse + e^sink), [B, Hq, R, 1]."""
    above = torch.where(lse == float("-inf"), lse, lse - sinks.to(lse.dtype)[:, None])  # no −inf minus −inf
    return above.sigmoid().unsqueeze(-1)


def seen_values(v: Tensor, visible: Tensor) -> Tensor:
    """Values with 0 where no row looks: free positions may hold NaN, and 0 · NaN would be NaN."""
    return torch.where(visible.any(1)[:, None, :, None], v, 0.0)
