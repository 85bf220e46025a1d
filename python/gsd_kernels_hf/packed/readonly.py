"""A tensor that nothing can be written to: what is made anew at every access would lose it without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as nested

IN_PLACE = {f"__i{name}__" for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()}
WRITES = {"__setitem__", "__set__", "__delete__", *IN_PLACE}


class ReadOnly(Tensor):
    """Refuses to be written to, itself and every view of it; what is computed from it is a tensor like any other."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` unless it writes to one of these."""
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        written = [given.get("out")]
        # nn.Parameter calls requires_grad_.
        in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        if in_place or name in WRITES or given.get("inplace"):
            written += [*args, *given.values()][:1]
        if any(isinstance(value, ReadOnly) for value in nested.tree_leaves(written)):
            raise ValueError(
                f"weight: {name} would write to a packed layer's weight, which is unpacked anew at every access; "
                "write to weight.clone(), or change the dense model and pack it"
            )
        with torch._C.DisableTorchFunctionSubclass():
            held = [value for value in nested.tree_leaves((args, given)) if isinstance(value, ReadOnly)]
            storages = {tensor.untyped_storage().data_ptr() for tensor in held}
            result = func(*args, **given)
            if isinstance(result, torch.Size):  # a map of it would be a tuple
                return result
            return nested.tree_map(lambda value: kept(value, storages), result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def kept(result: Any, storages: set[int]) -> Any:
    """A value that a function returned, read only where it shares storage with what it was given."""
    if isinstance(result, np.ndarray):
        result.flags.writeable = False
    if not isinstance(result, Tensor):
        return result
    return result.as_subclass(ReadOnly if result.untyped_storage().data_ptr() in storages else Tensor)
