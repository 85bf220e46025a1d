from __future__ import annotations

import torch
from torch import Tensor

from ..packed import PackedMatrix


def row_linear(x: Tensor, weight: Tensor | PackedMatrix) -> Tensor:
    """csrc/cpu/row_linear.cpp"""
    if isinstance(weight, PackedMatrix):
        return torch.ops.gsd_kernels.row_linear(x.contiguous(), weight.data, weight.kind.number, weight.scales)
    return torch.ops.gsd_kernels.row_linear(x.contiguous(), weight.contiguous())
