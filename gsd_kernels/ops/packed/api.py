from __future__ import annotations

import torch
from torch import Tensor

from ..table import Op
from . import reference
from .matrix import PackedMatrix

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Number formats that rows are unpacked to and multiplied in."""


def stored(matrix: PackedMatrix, rows: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | int | None, ...]:
    """A matrix as the operator takes it; a tensor says the dtype of the result."""
    like = torch.empty(0, dtype=dtype, device=matrix.data.device)
    return matrix.data, matrix.kind.number, matrix.scales, matrix.inputs, rows, like


unpack_rows = Op(
    "unpack_rows",
    "weight:uint8[O,W] kind:int=k scales?:float32[...] inputs:int=I rows?:int64[N] like:float[...] -> float32[N,I]",
    reference.unpack_rows,
    ranked=("cpu",),
    static=False,
    flat=stored,
)
