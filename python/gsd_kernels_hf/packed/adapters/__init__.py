"""Weights that a library loaded quantised, read as packed matrices: a file a library."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from . import bitsandbytes, compressed_tensors, gptqmodel, torchao
from .base import LibraryWeights
from .bitsandbytes import threshold_of

__all__ = ["ADAPTERS", "LibraryWeights", "stored_in", "threshold_of"]

ADAPTERS: tuple[Callable[[nn.Module], LibraryWeights | None], ...] = (
    torchao.stored,
    bitsandbytes.stored,
    compressed_tensors.stored,
    gptqmodel.stored,
)
"""Each says what a module's weights are, or ``None`` where they are not its library's."""


def stored_in(module: nn.Module) -> LibraryWeights | None:
    """How a library keeps the weights of a linear layer, or ``None`` where none quantised them."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    weight = module._parameters.get("weight")
    if type(weight) is nn.Parameter and weight.is_floating_point():  # dense, as most are; asked often
        return None
    if not module._parameters and not module._buffers:  # as parts that hold others
        return None
    return next((stored for adapter in ADAPTERS if (stored := adapter(module)) is not None), None)
