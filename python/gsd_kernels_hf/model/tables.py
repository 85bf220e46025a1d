"""Tables in which a model looks up where its tokens stand: they have an end, which rotary embeddings have not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .facts import Facts

INDEX_SELECTS = (torch.index_select, Tensor.index_select)


class Lookups(TorchFunctionMode):
    """Notes the shortest table of a model that a forward looks its tokens' positions up in.

    Args:
        facts: of the model, whose parameters, buffers and other tensors are its tables.
        positions: int [B, R], as ``position_ids`` of the forward.

    Attributes:
        end: positions that the table has entries for; ``None``: none was looked into.
    """

    def __init__(self, facts: Facts, positions: Tensor) -> None:
        super().__init__()
        self.positions = positions.flatten()
        # Other facts than the call's: the forward that is looked into may have a library rewrite its weights.
        self.owned = {tensor.data_ptr() for tensor in Facts(facts.model).tensors}
        self.end: int | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """``func`` as it is; noted if it looks up positions."""
        table, indices = looked_up(func, args)
        if isinstance(table, Tensor) and isinstance(indices, Tensor):
            self._note(table, indices.flatten())
        return func(*args, **(kwargs or {}))

    def _note(self, table: Tensor, indices: Tensor) -> None:
        indices = getattr(indices, "to_local", lambda: indices)()  # of a sharded model: the same on every rank
        if indices.shape != self.positions.shape or indices.is_floating_point() or table.data_ptr() not in self.owned:
            return
        offset = indices - self.positions.to(indices.device)  # some tables begin with entries for padding
        if bool((offset == offset[0]).all()):
            entries = table.shape[0] - int(offset[0])
            self.end = entries if self.end is None else min(self.end, entries)


def looked_up(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Any]:
    """A table and the indices of its first dimension that a call of ``func`` reads, or ``None`` twice."""
    if func is functional.embedding and len(args) > 1:
        return args[1], args[0]
    if func is Tensor.__getitem__:
        return args[0], args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
    if func in INDEX_SELECTS and len(args) > 2 and args[1] == 0:
        return args[0], args[2]
    return None, None
