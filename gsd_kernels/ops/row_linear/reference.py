from __future__ import annotations

from torch import Tensor

from ..packed import PackedMatrix, codes, unpack_rows


def row_linear(x: Tensor, weight: Tensor | PackedMatrix) -> Tensor:
    """x · weightᵀ for few rows, where reading the weights is what takes time.

    Sums are in float32 and rounded once. A row's result depends on that row alone, not on how many there are.

    Args:
        x: float32, bfloat16 or float16 [rows, in], contiguous.
        weight: [out, in], contiguous, of the dtype of ``x``; or packed, with the bits of the dense matrix it
            stands for; with rows rounded first where the kind says so.

    Returns:
        [rows, out]
    """
    if isinstance(weight, PackedMatrix):
        if weight.kind.name in codes.LINEARS:
            return codes.linear(x, weight, x.dtype).to(x.dtype)
        weight = unpack_rows(weight, dtype=x.dtype, backend="reference")
    return (x.float() @ weight.float().T).to(x.dtype)
