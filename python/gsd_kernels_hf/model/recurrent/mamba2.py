"""The state space of Mamba-2 (arXiv 2405.21060): a gated delta rule without the delta."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.nn.functional import silu, softplus

from ..elementwise import as_rows, plain
from .recurrence import Recurrence
from .step_limit import Limit
from .tree import RowTree


class Mamba2(Recurrence):
    """``mamba2_chunk_scan`` over rows; steps in time have their limit in what ends a prompt, as in transformers."""

    def laid_out(self, state: Tensor) -> Tensor:
        """transformers keeps [B, H, V, K]."""
        return state.transpose(-1, -2)

    def __call__(
        self,
        tree: RowTree,
        hidden_states: Tensor,  # [B, R, H, V]
        dt: Tensor,  # [B, R, H]
        A: Tensor,  # [H]
        B: Tensor,  # [B, R, G, K]
        C: Tensor,
        chunk_size: int = 0,
        D: Tensor | None = None,  # [H] or [H, V]
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: Limit = (0.0, math.inf),
        return_final_states: bool = False,
        z: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """Output of rows [B, R, H, V], and an empty state where one is asked for."""
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = plain(softplus(as_rows(dt)))
        if self.behind_prompt and dt_limit != (0.0, math.inf):
            ends = tree.parents[:, tree.first :, None] < 0  # [B, R, 1]
            dt = dt.clamp(*dt_limit).where(ends, dt)
        x, step = hidden_states.float(), dt.float()[..., None]
        out = self.rows(tree, C, B, x * step, A.float()[:, None] * step, None)
        if D is not None:
            out = out + x * (D[:, None] if D.dim() == 1 else D).float()
        if z is not None:
            out = out * plain(silu(as_rows(z.float())))
        out = out.to(hidden_states.dtype)
        return (out, out.new_empty(0)) if return_final_states else out
