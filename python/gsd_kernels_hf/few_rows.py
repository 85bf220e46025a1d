"""A model's linear layers over few rows, on a CPU.

Verification forwards a few rows: too many for a product of matrix and vector, too few for what general products of
matrices prepare. There :func:`gsd_kernels.ops.row_linear` reads every weight once for all rows.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gsd_kernels.backends import unavailable_reason
from gsd_kernels.ops.row_linear import row_linear
from gsd_kernels.ops.row_linear.api import FLOATS, LANES

MOST_ROWS = 48
"""From here on general products are as fast."""


class FewRowsLinear(nn.Linear):
    """An ``nn.Linear`` that takes 2 … :data:`MOST_ROWS` rows through one operator."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        if not 1 < rows <= MOST_ROWS or input.dtype != self.weight.dtype:
            return super().forward(input)
        out = row_linear(input.reshape(rows, -1), self.weight).view(*input.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


def view_for_few_rows(model: PreTrainedModel, backend: str) -> PreTrainedModel:
    """``model`` with its linear layers seen as :class:`FewRowsLinear`: the same weights, nothing is changed.

    The model itself where that is impossible or no gain: another device or backend, sharded or offloaded weights.
    """
    unserved = backend not in ("auto", "cpu") or unavailable_reason("cpu", model.device) is not None
    if unserved or getattr(model, "_device_mesh", None) is not None:
        return model
    if any("forward" in vars(module) for module in model.modules()):  # dispatched by hooks
        return model
    return _view(model)


def _view(module: Any) -> Any:
    if type(module) is nn.Linear:
        if not _serves(module.weight):
            return module
        linear = copy.copy(module)
        linear.__class__ = FewRowsLinear
        return linear
    children = {name: child if child is None else _view(child) for name, child in module._modules.items()}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    return with_children(module, children)


def _serves(weight: Tensor) -> bool:
    # Hardware for bfloat16 is what PyTorch's products use and this operator does not.
    served = FLOATS if not torch.cpu._is_avx512_bf16_supported() else (torch.float32,)
    plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.is_contiguous()
    return plain and weight.dtype in served and weight.shape[1] % LANES == 0


def with_children(module: Any, children: dict[str, nn.Module | None]) -> Any:
    """A shallow copy of ``module`` with other children."""
    view = copy.copy(module)
    view.__dict__["_modules"] = {**module._modules, **children}
    return view
