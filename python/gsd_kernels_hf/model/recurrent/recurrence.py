"""Recurrent kernels of transformers over rows, with a window of the text, see :mod:`gsd_kernels.ops.state_rows`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from gsd_kernels.ops.state_rows import StateWindow, state_commit, state_rows

from ..elementwise import as_rows, plain
from .tree import RowTree

EPS = 1e-6
Limit = tuple[float, float]
"""The least and the largest step in time."""
UNLIMITED: Limit = (0.0, math.inf)


class Recurrence:
    """A recurrent kernel of transformers over rows; a class each says what its arguments mean.

    Args:
        block: tokens between two states.
        backend: of the ops.
    """

    used = True

    def __init__(self, block: int, backend: str) -> None:
        self.block, self.backend = block, backend
        self.window: StateWindow | None = None
        self.state: Tensor | None = None  # [B, H, K, V], of the prompt, until the first rows
        self.fresh = True  # whether no rows came since the prompt
        self.behind_prompt = False  # whether none was taken into the text

    def __call__(self, tree: RowTree, *args: Any, **options: Any) -> Any:
        """Return what the kernel does of rows."""
        raise NotImplementedError

    def laid_out(self, state: Tensor) -> Tensor:
        """The state as transformers keeps it, as [B, H, K, V], and back."""
        return state

    def begin(self, state: Tensor | None) -> None:
        """Go on behind a prompt that left ``state``."""
        self.state, self.fresh = None if state is None else self.laid_out(state), True
        self.behind_prompt = True

    def end(self) -> Tensor | None:
        """The state at the end of the text, as transformers keeps it."""
        if self.window is None or self.fresh:
            return None if self.state is None else self.laid_out(self.state).contiguous()
        return self.laid_out(self.window.end(self.lengths)).contiguous()

    def rows(
        self,
        tree: RowTree,
        query: Tensor,  # [B, R, G, K]
        key: Tensor,
        value: Tensor,  # [B, R, H, V]
        decay: Tensor,  # [B, R, H, 1 or K], logarithms
        beta: Tensor | None,  # [B, R, H]
    ) -> Tensor:
        """See :func:`gsd_kernels.ops.state_rows.state_rows`; float32 [B, R, H, V]."""
        batch, _, groups, size = key.shape
        heads, width, decays = value.shape[2], value.shape[3], decay.shape[3]
        if self.fresh:
            if self.window is None or self.window.state.shape[1:] != (batch, heads, size, width):
                sizes = (batch, heads, groups, size, width, decays)
                self.window = StateWindow.empty(*sizes, key.device, self.block)
            self.window.state[0] = 0.0 if self.state is None else self.state
            self.lengths = torch.zeros(batch, dtype=torch.int32, device=key.device)  # since the prompt
            self.state, self.fresh = None, False
        assert self.window is not None
        parents, depths = tree.narrow
        self.window.reserve(parents.shape[1])
        given = (t.to(torch.float32) for t in (query, key, value, decay))
        beta = None if beta is None else beta.to(torch.float32)
        return state_rows(*given, beta, parents, depths, self.lengths, self.window, backend=self.backend)

    def commit(self, accepted_rows: Tensor, num_accepted: Tensor) -> None:
        """See :class:`~.mixers.Form`."""
        if self.window is None or self.fresh:
            return
        device = self.lengths.device
        accepted, count = accepted_rows.to(device, torch.int32), num_accepted.to(device, torch.int32)
        state_commit(accepted, count, self.lengths, self.window, backend=self.backend)
        self.lengths, self.behind_prompt = self.lengths + count, False

    @property
    def nbytes(self) -> int:
        """Bytes of the window."""
        return (0 if self.window is None else self.window.nbytes) + (0 if self.state is None else self.state.nbytes)


class GatedDelta(Recurrence):
    """The gated delta rule (arXiv 2412.06464), and Kimi's, whose decays are a key channel's own (arXiv 2510.26692).

    ``torch_chunk_gated_delta_rule`` and ``chunk_kimi_delta_attention`` over rows.
    """

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


def time_steps(dt: Tensor, bias: Tensor | None, rectified: bool, limit: Limit, ends: Tensor | None) -> Tensor:
    """Mamba-2's steps in time, within the limit for tokens that end a prompt.

    ``ends``: bool, which ones do; ``None``: none of them.
    """
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if rectified:
        dt = plain(softplus(as_rows(dt)))
    return dt if ends is None or limit == UNLIMITED else dt.clamp(*limit).where(ends, dt)


class Mamba2(Recurrence):
    """The state space of Mamba-2 (arXiv 2405.21060), a gated delta rule without the delta: ``mamba2_chunk_scan``.

    Steps in time have their limit in what ends a prompt, as in transformers.
    """

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
        dt_limit: Limit = UNLIMITED,
        return_final_states: bool = False,
        z: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """Output of rows [B, R, H, V], and an empty state where one is asked for."""
        ends = tree.parents[:, tree.first :, None] < 0 if self.behind_prompt else None  # [B, R, 1]
        dt = time_steps(dt, dt_bias, dt_softplus, dt_limit, ends)
        x, step = hidden_states.float(), dt.float()[..., None]
        out = self.rows(tree, C, B, x * step, A.float()[:, None] * step, None)
        if D is not None:
            out = out + x * (D[:, None] if D.dim() == 1 else D).float()
        if z is not None:
            out = out * plain(silu(as_rows(z.float())))
        out = out.to(hidden_states.dtype)
        return (out, out.new_empty(0)) if return_final_states else out
