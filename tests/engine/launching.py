"""Steps as a GPU's backends would take them, on a machine without one: values by the CPU's ops."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._library.custom_ops import CustomOpDef

from gsd_kernels.ops.table import OPS

LAUNCHED = {name: op for name, op in OPS.items() if "triton" in op.implementations}


def described(value: Any) -> Any:
    """An argument without its content, as much as the compiler sees of it."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if hasattr(value, "_fields"):  # a record that is a tuple stays one
        return type(value)(*map(described, value))
    if isinstance(value, (list, tuple)):
        return [described(element) for element in value]
    if dataclasses.is_dataclass(value):
        value = copy.copy(value)
        vars(value).update({name: described(field) for name, field in vars(value).items()})
    return value


def both(launch: Callable[..., Any], values: Callable[..., Any]) -> Callable[..., Any]:
    """An op that launches for what its arguments look like, and computes elsewhere."""

    def call(*args: Any, **kwargs: Any) -> Any:
        launch(*map(described, args))
        return values(*args, **kwargs)

    return call


def run_launch_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the operators of Triton kernels run their launch code on described tensors, which PyTorch would pass over."""
    from gsd_kernels.ops.sampling.triton import Tickets

    monkeypatch.setattr(CustomOpDef, "__call__", lambda self, *args: self._init_fn(*args))
    # They are kept from launch to launch.
    monkeypatch.setattr(Tickets, "of", lambda self, like, rows: like.new_empty(rows, dtype=torch.int32))
