from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def commit_kv(
    k_caches: Sequence[Tensor], v_caches: Sequence[Tensor], accepted_rows: Tensor, num_accepted: Tensor, kv_len: Tensor
) -> None:
    """csrc/cpu/graph_ops.cpp or csrc/cuda/commit_kv.cu: all layers in one call."""
    torch.ops.gsd_kernels.commit_kv(
        list(k_caches), list(v_caches), accepted_rows.contiguous(), num_accepted.contiguous(), kv_len
    )
