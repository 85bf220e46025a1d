from __future__ import annotations

import torch
from torch import Tensor

from ...graph import Acceptance, Rows


def verify(rows: Rows, sampled: Tensor, eos_ids: Tensor, remaining: Tensor, done: Tensor, max_path: int) -> Acceptance:
    """csrc/algorithms/verify.h, on the CPU or the GPU."""
    return Acceptance(
        *torch.ops.gsd_kernels.verify(
            rows.token_ids.contiguous(),
            rows.parent_rows.contiguous(),
            rows.depths.contiguous(),
            rows.ancestor_mask.contiguous(),
            rows.num_rows.contiguous(),
            sampled.contiguous(),
            eos_ids.contiguous(),
            remaining.contiguous(),
            done.contiguous(),
            max_path,
        )
    )
