"""The gated delta rule (arXiv 2412.06464), and Kimi's, whose decays are a key channel's own (arXiv 2510.26692)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .recurrence import Recurrence
from .tree import RowTree

EPS = 1e-6


class GatedDelta(Recurrence):
    """``torch_chunk_gated_delta_rule`` and ``chunk_kimi_delta_attention`` over rows."""

    def __call__(
        self,
        tree: RowTree,
        query: Tensor,  # [B, R, G, K]
        key: Tensor,
        value: Tensor,  # [B, R, H, V]
        g: Tensor,  # [B, R, H] or [B, R, H, K]
        beta: Tensor,  # [B, R, H]
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Output of rows [B, R, H, V], and an empty state."""
        dtype = query.dtype
        query, key = query.float(), key.float()
        if use_qk_l2norm_in_kernel:
            query, key = normalised(query), normalised(key)
        decay = g[..., None] if g.dim() == 3 else g
        out = self.rows(tree, query * query.shape[-1] ** -0.5, key, value, decay, beta)
        return out.to(dtype), out.new_empty(0)


def normalised(x: Tensor) -> Tensor:
    """Of length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)
