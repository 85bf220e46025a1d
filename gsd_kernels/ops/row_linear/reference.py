from __future__ import annotations

from torch import Tensor

from ..packed import PackedMatrix, codes, unpack_rows


def row_linear(x: Tensor, weight: Tensor | PackedMatrix) -> Tensor:
    if isinstance(weight, PackedMatrix):
        if weight.kind.name in codes.LINEARS:
            return codes.linear(x, weight, x.dtype).to(x.dtype)
        weight = unpack_rows(weight, dtype=x.dtype, backend="reference")
    return (x.float() @ weight.float().T).to(x.dtype)
