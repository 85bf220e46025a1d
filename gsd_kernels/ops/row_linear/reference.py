from __future__ import annotations

from torch import Tensor


def row_linear(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() @ weight.float().T).to(x.dtype)
