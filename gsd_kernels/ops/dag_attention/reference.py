from __future__ import annotations

import torch
from torch import Tensor

from ...graph import WORD_BITS, unpack_bits


def dag_attention(
    q: Tensor,  # [B, Hq, R, D]
    k: Tensor,  # [B, Hkv, S, D]
    v: Tensor,  # [B, Hkv, S, Dv]
    ancestor_mask: Tensor,  # int32 [B, R, words]
    kv_len: Tensor,  # int32 [B]
    kv_start: Tensor | None,
    num_nodes: Tensor | None,
    row_depths: Tensor | None,
    node_depths: Tensor | None,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
    *,
    visible: Tensor | None = None,  # bool [B, R, S], computed from the words if not given
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the visible positions, in float32 (float64 for float64 inputs)."""
    if visible is None:
        visible = visibility(
            ancestor_mask, kv_len, kv_start, num_nodes, row_depths, node_depths, sliding_window, k.shape[2]
        )
    return attend(q, k, v, visible, scale, softcap)


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None
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
    return out.to(q.dtype), lse.view(batch, heads, rows).float()


def seen_values(v: Tensor, visible: Tensor) -> Tensor:
    """Values with 0 where no row looks: free positions may hold NaN, and 0 · NaN would be NaN."""
    return torch.where(visible.any(1)[:, None, :, None], v, 0.0)


def visibility(
    ancestor_mask: Tensor,
    kv_len: Tensor,
    kv_start: Tensor | None,
    num_nodes: Tensor | None,
    row_depths: Tensor | None,
    node_depths: Tensor | None,
    sliding_window: int | None,
    capacity: int,
) -> Tensor:
    """Which cache positions each row sees: bool [B, R, S]."""
    bits = ancestor_mask.shape[-1] * WORD_BITS
    position = torch.arange(capacity, device=ancestor_mask.device)
    in_prefix = position < kv_len[:, None]  # [B, S]
    if kv_start is not None:
        in_prefix &= position >= kv_start[:, None]
    node = position - kv_len[:, None]  # [B, S]
    is_node = (node >= 0) & (node < (bits if num_nodes is None else num_nodes[:, None].clamp(max=bits)))
    by_node = unpack_bits(ancestor_mask, bits)  # [B, R, bits]
    rows = by_node.shape[1]
    by_position = by_node.gather(2, node.clamp(0, bits - 1)[:, None].expand(-1, rows, -1))  # [B, R, S]
    visible = in_prefix[:, None] | (by_position & is_node[:, None])
    if sliding_window is not None and row_depths is not None and node_depths is not None:
        depth = node_depths.gather(1, node.clamp(0, node_depths.shape[1] - 1))  # [B, S]
        distance = row_depths[:, :, None] - torch.where(node >= 0, depth, node)[:, None]
        visible = visible & (distance < sliding_window)
    return visible
