"""Weights that a library loaded quantised, read as packed matrices: a file a library."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from . import bitsandbytes, compressed_tensors, gptqmodel, torchao
from .base import Described, Stored
from .bitsandbytes import threshold_of

__all__ = ["ADAPTERS", "Stored", "threshold_of"]

ADAPTERS: tuple[Callable[[nn.Module], Described | None], ...] = (
    torchao.described,
    bitsandbytes.described,
    compressed_tensors.described,
    gptqmodel.described,
)
"""Each says what a linear layer's weights are, or ``None`` where they are not its library's."""
