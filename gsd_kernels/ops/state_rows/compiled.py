"""csrc/cpu/state_rows.cpp"""

from __future__ import annotations

import torch
from torch import Tensor

from .window import StateWindow


def state_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    parents: Tensor,
    depths: Tensor,
    lengths: Tensor,
    window: StateWindow,
) -> Tensor:
    given = (t.contiguous() for t in (query, key, value, decay))
    return torch.ops.gsd_kernels.state_rows(
        *given,
        None if beta is None else beta.contiguous(),
        parents.contiguous(),
        depths.contiguous(),
        lengths,
        window.state,
        window.keys,
        window.updates,
        window.sums,
        window.block,
    )


def state_commit(accepted_rows: Tensor, num_accepted: Tensor, lengths: Tensor, window: StateWindow) -> None:
    torch.ops.gsd_kernels.state_commit(
        accepted_rows.contiguous(),
        num_accepted.contiguous(),
        lengths,
        window.state,
        window.keys,
        window.updates,
        window.sums,
        window.block,
    )
