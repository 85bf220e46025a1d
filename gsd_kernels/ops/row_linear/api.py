from __future__ import annotations

import torch
from torch import Tensor

from ...backends import implementations_of, resolve
from ...checks import check_tensor
from ..packed import PackedMatrix
from . import compiled, reference

IMPLEMENTATIONS = implementations_of("row_linear", cpu=compiled, reference=reference)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def row_linear(x: Tensor, weight: Tensor | PackedMatrix, *, backend: str = "auto") -> Tensor:
    """x · weightᵀ for few rows, where reading the weights is what takes time.

    Sums are in float32 and rounded once. A row's result depends on that row alone, not on how many there are.

    Args:
        x: float32, bfloat16 or float16 [rows, in], contiguous.
        weight: [out, in], contiguous, of the dtype of ``x``; or packed, with the bits of the dense matrix it
            stands for; with rows rounded first where the kind says so.

    Returns:
        [rows, out]

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    check_tensor("x", x, (None, None), FLOATS, x.device)
    if isinstance(weight, PackedMatrix):
        if weight.inputs != x.shape[1] or weight.device != x.device:
            raise ValueError(
                f"weight: expected {x.shape[1]} inputs on {x.device}, as x has, got {weight.inputs} on {weight.device}"
            )
    else:
        check_tensor("weight", weight, (None, x.shape[1]), (x.dtype,), x.device)
    return resolve(backend, x.device, IMPLEMENTATIONS)(x, weight)
