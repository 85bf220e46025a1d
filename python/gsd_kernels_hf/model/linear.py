"""A model's linear layers on a CPU.

Verification forwards a few rows: too many for a product of matrix and vector, too few for what general products of
matrices prepare. There :func:`gsd_kernels.ops.row_linear` reads every weight once for all rows. Prompts and large
budgets have more rows; in half precision, where the CPU has no instructions for it, general products spend most of
their time in conversions, and widening every weight once is several times faster.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gsd_kernels.backends import unavailable_reason
from gsd_kernels.config import MAX_ROWS
from gsd_kernels.ops.packed.api import FLOATS
from gsd_kernels.ops.row_linear import row_linear

from .elementwise import are_own_bits_wanted, as_rows, plain
from .facts import Facts, foreign_code
from .view import seen

MOST_ROWS = 64
"""With many more rows general products are as fast."""
WIDENED_WEIGHTS = 1 << 20
"""Weights in float32, 4 MiB: they stay in a cache until they are used."""


class CpuLinear(nn.Linear):
    """An ``nn.Linear`` that takes 2 … :data:`MOST_ROWS` rows through one operator, and more of them in float32.

    Sums are in float32 and rounded once either way.
    """

    fewest, most = 2, MOST_ROWS

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.weight.shape[1]
        if rows < self.fewest or input.dtype != self.weight.dtype:
            return super().forward(input)
        if rows <= self.most:
            out = row_linear(input.reshape(rows, -1), self.weight)
        elif self.weight.dtype != torch.float32:
            out = widened_linear(input.reshape(rows, -1), self.weight)
        else:
            return super().forward(input)
        out = out.view(*input.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


class RowLinear(CpuLinear):
    """A :class:`CpuLinear` for one row too, and for all of a step: a row has the same bits alone and among them.

    However many sequences have rows in a step; of a prompt, as many as one sequence's rows.
    """

    fewest = 1

    @property
    def most(self) -> int:  # type: ignore[override]
        """Rows that the operator takes."""
        return sys.maxsize if are_own_bits_wanted() else MAX_ROWS

    def forward(self, input: Tensor) -> Tensor:
        return as_rows(super().forward(plain(input)))


def widened_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ in float32, for half precision: [rows, in] and [out, in] → [rows, out]."""
    wide, columns = x.float(), max(1, WIDENED_WEIGHTS // weight.shape[1])
    out = x.new_empty(x.shape[0], weight.shape[0])
    for begin in range(0, weight.shape[0], columns):
        end = begin + columns
        out[:, begin:end] = nn.functional.linear(wide, weight[begin:end].float())
    return out


def with_cpu_linears(model: PreTrainedModel, backend: str, kind: type[CpuLinear] = CpuLinear) -> PreTrainedModel:
    """``model`` with its linear layers seen as ``kind``: the same weights, nothing is changed.

    The model itself where that is impossible or no gain: another device or backend, sharded or offloaded weights; code
    that neither transformers nor PyTorch brought, to which a view might not be the same.
    """
    unserved = backend not in ("auto", "cpu") or unavailable_reason("cpu", model.device) is not None
    if unserved or getattr(model, "_device_mesh", None) is not None or foreign_code(Facts.of(model)) is not None:
        return model
    view: PreTrainedModel = seen(model, lambda module: _as(kind, module))
    return view


def _as(kind: type[CpuLinear], module: Any) -> Any:
    if type(module) is not nn.Linear or not (serves(module.weight) or (kind is RowLinear and is_plain(module.weight))):
        return module
    linear = copy.copy(module)
    linear.__class__ = kind
    return linear


def serves(weight: Tensor) -> bool:
    """Return whether PyTorch's own products are slower for this weight."""
    # Hardware for bfloat16 is what PyTorch's products use and these do not.
    served = FLOATS if not torch.cpu._is_avx512_bf16_supported() else (torch.float32,)
    return is_plain(weight) and weight.dtype in served


def is_plain(weight: Tensor) -> bool:
    """Return whether the operator takes this weight."""
    plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.is_contiguous()
    return plain and weight.dtype in FLOATS
