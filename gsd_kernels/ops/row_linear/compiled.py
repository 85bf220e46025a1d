from __future__ import annotations

import torch
from torch import Tensor


def row_linear(x: Tensor, weight: Tensor) -> Tensor:
    """csrc/cpu/row_linear.cpp"""
    return torch.ops.gsd_kernels.row_linear(x.contiguous(), weight.contiguous())
