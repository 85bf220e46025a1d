from __future__ import annotations

import torch
from torch import Tensor

from ...graph import Acceptance, Rows


def verify(rows: Rows, sampled: Tensor, eos_ids: Tensor, remaining: Tensor, done: Tensor, max_path: int) -> Acceptance:
    """csrc/algorithms/verify.h, on the CPU or the GPU."""
    tree = (rows.token_ids, rows.parent_rows, rows.depths, rows.ancestor_mask, rows.num_rows)
    given = (t.contiguous() for t in (*tree, sampled, eos_ids, remaining, done))
    return Acceptance(*torch.ops.gsd_kernels.verify(*given, max_path))
