from __future__ import annotations

import torch
from torch import Tensor


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
    """csrc/cpu/attention.cpp"""
    torch.ops.gsd_kernels.write_kv(k_cache, v_cache, k, v, positions.contiguous())
