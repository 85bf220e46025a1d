"""Parts that recurrent kernels share: a window of the text, see :mod:`gsd_kernels.ops.state_rows`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gsd_kernels.ops.state_rows import StateWindow, state_commit, state_rows

from .tree import RowTree


class Recurrence:
    """A recurrent kernel of transformers over rows; a file each says what its arguments mean.

    Args:
        block: tokens between two states.
        backend: of the ops.
    """

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
