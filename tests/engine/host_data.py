"""A mode that refuses data from the host."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoHostData(TorchDispatchMode):
    """Fails where a tensor is made from host data, which on a GPU is a copy that cannot be captured."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten.lift_fresh.default, "a tensor of host data"
        return func(*args, **(kwargs or {}))
