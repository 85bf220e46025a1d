"""Functions of single elements on a CPU, such that an element's result does not depend on where in a tensor it lies.

PyTorch computes exponentials and what is made of them two vectors at a time; what is left over at the end of a thread's
share goes element by element, through another formula. So the last bits of ``silu`` of a row depend on how many rows
there are, wherever a row is no multiple of two vectors. In :func:`own_bits` outputs of linear layers are :class:`Rows`,
of which these functions get whole vectors alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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


def are_own_bits_wanted() -> bool:
    """Return whether this thread is in an :func:`own_bits` that wants them."""
    return _wanted.get()[0]


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
