from __future__ import annotations

from typing import Any

from torch import Tensor

from ..packed import PackedMatrix
from ..table import Op
from . import reference


def stored(x: Tensor, weight: Tensor | PackedMatrix) -> tuple[Any, ...]:
    """A matrix as the operator takes it."""
    if isinstance(weight, PackedMatrix):
        return x, weight.data, weight.kind.number, weight.scales
    return x, weight, -1, None


row_linear = Op(
    "row_linear",
    "x:float[R,I] weight:float[O,W] kind:int=k scales?:float32[...] -> float32[R,O]",
    reference.row_linear,
    ranked=("cpu",),
    static=False,
    flat=stored,
)
