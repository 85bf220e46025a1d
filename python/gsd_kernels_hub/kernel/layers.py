"""Layers that the kernels package puts in place of a model's own."""

from __future__ import annotations

from torch import Tensor, nn

from .ops.row_linear import row_linear


class Linear(nn.Module):
    """Product of rows with a weight matrix, on a CPU: a row has the same bits alone and among others."""

    has_backward = False
    weight: Tensor  # [out, in]
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:  # [..., in] -> [..., out]
        rows = row_linear(input.reshape(-1, input.shape[-1]), self.weight, backend="cpu")
        out = rows.view(*input.shape[:-1], self.weight.shape[0])
        return out if self.bias is None else out + self.bias
