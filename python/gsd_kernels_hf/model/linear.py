"""A model's linear layers, and functions of single elements, on a CPU.

Verification forwards a few rows: too many for a product of matrix and vector, too few for what general products of
matrices prepare. There :func:`gsd_kernels.ops.row_linear` reads every weight once for all rows. Prompts and large
budgets have more rows; in half precision, where the CPU has no instructions for it, general products spend most of
their time in conversions, and widening every weight once is several times faster.

PyTorch computes exponentials and what is made of them two vectors at a time; what is left over at the end of a thread's
share goes element by element, through another formula. So the last bits of ``silu`` of a row depend on how many rows
there are, wherever a row is no multiple of two vectors. In :func:`own_bits` outputs of linear layers are :class:`Rows`,
of which these functions get whole vectors alone: an element's result does not depend on where in a tensor it lies.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from gsd_kernels.backends import unavailable_reason
from gsd_kernels.config import MAX_ROWS
from gsd_kernels.ops.packed.api import FLOATS
from gsd_kernels.ops.row_linear import row_linear

from .facts import Facts, foreign_code
from .properties import seen

MOST_ROWS = 64
"""With many more rows general products are as fast."""
WIDENED_WEIGHTS = 1 << 20
"""Weights in float32, 4 MiB: they stay in a cache until they are used."""


VECTORS = 64
"""Elements of two vectors, at most: of half precision with AVX-512."""
SHARE = 1 << 14
"""Elements that PyTorch computes on one thread in any case: of GELU no more."""
NAMES = (
    *("exp", "exp2", "expm1", "log", "log2", "log1p", "pow", "__pow__", "sigmoid", "logsigmoid", "tanh", "erf"),
    *("silu", "gelu", "softplus", "mish", "elu", "selu", "celu", "sin", "cos", "tan", "sinh", "cosh"),
)
FUNCTIONS = frozenset(getattr(place, name) for place in (torch, F, Tensor) for name in NAMES if hasattr(place, name))

_wanted: ContextVar[tuple[bool, bool]] = ContextVar("own_bits", default=(False, False))


class CpuLinear(nn.Linear):
    """An ``nn.Linear`` that takes 2 … :data:`MOST_ROWS` rows through one operator, and more of them in float32.

    Sums are in float32 and rounded once either way.
    """

    fewest, most = 2, MOST_ROWS

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.weight.shape[1]
        many, dtype = rows > self.most, self.weight.dtype
        if rows < self.fewest or input.dtype != dtype or (many and dtype == torch.float32):
            return super().forward(input)
        flat = input.reshape(rows, -1)
        out = (widened_linear(flat, self.weight) if many else row_linear(flat, self.weight)).view(*input.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


class RowLinear(CpuLinear):
    """A :class:`CpuLinear` for one row too, and for all of a step: a row has the same bits alone and among them.

    However many sequences have rows in a step; of a prompt, as many as one sequence's rows.
    """

    fewest = 1

    @property
    def most(self) -> int:  # type: ignore[override]
        """Rows that the operator takes."""
        return sys.maxsize if _wanted.get()[0] else MAX_ROWS

    def forward(self, input: Tensor) -> Tensor:
        return as_rows(super().forward(plain(input)))


def widened_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ in float32, for half precision: [rows, in] and [out, in] → [rows, out]."""
    wide, columns = x.float(), max(1, WIDENED_WEIGHTS // weight.shape[1])
    out = x.new_empty(x.shape[0], weight.shape[0])
    for begin in range(0, weight.shape[0], columns):
        end = begin + columns
        out[:, begin:end] = F.linear(wide, weight[begin:end].float())
    return out


def with_cpu_linears(model: PreTrainedModel, backend: str, kind: type[CpuLinear] = CpuLinear) -> PreTrainedModel:
    """``model`` with its linear layers seen as ``kind``: the same weights, nothing is changed.

    The model itself where that is impossible or no gain: another device or backend, sharded or offloaded weights; code
    that neither transformers nor PyTorch brought, to which a view might not be the same.
    """
    unserved = backend not in ("auto", "cpu") or unavailable_reason("cpu", model.device) is not None
    if unserved or getattr(model, "_device_mesh", None) is not None or foreign_code(Facts.of(model)) is not None:
        return model

    def instead(module: Any) -> Any:
        if type(module) is not nn.Linear or not serves(module.weight, kind):
            return module
        linear = copy.copy(module)
        linear.__class__ = kind
        return linear

    view: PreTrainedModel = seen(model, instead)
    return view


def serves(weight: Tensor, kind: type[CpuLinear] = CpuLinear) -> bool:
    """Return whether the operator takes this weight, and PyTorch's own products are slower or have other bits."""
    # Hardware for bfloat16 is what PyTorch's products use and these do not.
    slower = (torch.float32,) if kind is CpuLinear and torch.cpu._is_avx512_bf16_supported() else FLOATS
    plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.is_contiguous()
    return plain and weight.dtype in slower


@contextlib.contextmanager
def own_bits(wanted: bool, *, in_parts: bool = False) -> Iterator[None]:
    """Inside, in this thread, linear layers of rows return :class:`Rows`, where that is ``wanted`` and has an effect.

    ``in_parts``: outputs may be cut into parts of any size.
    """
    token = _wanted.set((wanted, in_parts))
    try:
        yield
    finally:
        _wanted.reset(token)


class Rows(Tensor):
    """An output of rows [..., D], and what is computed from it: functions of its elements see whole vectors."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FUNCTIONS and not kwargs.get("inplace") and not any(isinstance(a, Tensor) for a in args[1:]):
            return in_whole_vectors(func, plain(args[0]), *args[1:], **kwargs).as_subclass(cls)
        return super().__torch_function__(func, types, args, kwargs)


def as_rows(x: Tensor) -> Tensor:
    """``x`` [..., D] as :class:`Rows`, in :func:`own_bits`, where PyTorch would not see whole vectors anyway."""
    wanted, in_parts = _wanted.get()
    if not wanted:
        return x
    split = in_parts or x.shape[-1] % VECTORS or (x.numel() > SHARE and torch.get_num_threads() > 1)
    return x.as_subclass(Rows) if split else x


def plain(x: Tensor) -> Tensor:
    """``x`` as an ordinary tensor."""
    if not isinstance(x, Rows):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def in_whole_vectors(func: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``func(x, …)``, a function of single elements, of the same shape."""
    flat = x.reshape(-1)
    if rest := -flat.numel() % VECTORS:
        flat = torch.cat([flat, flat.new_ones(rest)])
    shares = [func(share, *args, **kwargs) for share in flat.split(SHARE)]
    out = shares[0] if len(shares) == 1 else torch.cat(shares)
    return out[: x.numel()].view(x.shape)
