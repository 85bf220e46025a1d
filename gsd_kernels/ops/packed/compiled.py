from __future__ import annotations

import torch
from torch import Tensor

from .matrix import PackedMatrix


def unpack_rows(matrix: PackedMatrix, rows: Tensor | None, dtype: torch.dtype) -> Tensor:
    """csrc/cpu/row_linear.cpp"""
    like = torch.empty(0, dtype=dtype, device=matrix.data.device)
    return torch.ops.gsd_kernels.unpack_rows(
        matrix.data, matrix.kind.number, matrix.scales, matrix.inputs, None if rows is None else rows.contiguous(), like
    )
