"""Operators whose kernels are launched from Python: where they are launched. Importing this imports no triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def launching_op(name: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """:func:`torch.library.custom_op` for a function that launches Triton kernels: on the GPU of its tensors.

    Triton launches on the thread's current device and stream, which need not be those of the tensors: a model on the
    second GPU would fail, or race with the stream that wrote its tensors. PyTorch's own operators, and the compiled
    ones, switch by themselves. Tensors elsewhere than on a GPU switch nothing.

    Args:
        name: of the operator, with its namespace.
        options: of :func:`torch.library.custom_op`.

    Returns:
        A decorator that gives the operator.
    """

    def decorate(launch: Callable[..., Any]) -> Any:
        @wraps(launch)
        def launch_there(*args: Any) -> Any:
            device = device_of(args)
            if device.type != "cuda":
                return launch(*args)
            with torch.cuda.device(device):
                return launch(*args)

        return torch.library.custom_op(name, **options)(launch_there)

    return decorate


def device_of(arguments: Sequence[Any]) -> torch.device:
    """Where an op's tensors lie: the first one among its arguments, or in a record."""
    for value in arguments:
        if isinstance(value, Tensor):
            return value.device
    record = arguments[0]
    return record.device if hasattr(record, "device") else record.tensors()[0].device
