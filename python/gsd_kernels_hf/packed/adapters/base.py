"""The weights of a module that a library keeps quantised, as an adapter describes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gsd_kernels.ops.packed import PackedMatrix

BY_BITS = {4: "int4", 8: "uint8"}
"""Kinds of codes with zero points, by the bits of a code."""


@dataclass(frozen=True)
class LibraryWeights:
    """A linear layer's weights as a library keeps them, and how they are read as a packed matrix.

    The matrix stands for what the library's own dequantisation gives, bit for bit, in :attr:`dtype`.

    Attributes:
        name: of the format, and of the library.
        tensors: all that the matrix depends on.
        shape: of the dense matrix, outputs and inputs.
        dtype: that the library dequantises to.
        read: makes the packed matrix, of the library's own storage where rows lie there one after the other.
        problem: why the weights are not read; completes a sentence that begins with the module's name. ``None``: they
            can be.
        rounds_rows: whether rows are rounded to eight bits before they are multiplied.
        any_dtype: whether a model of any dtype has the layer: what is multiplied has that of the rows.
    """

    name: str
    tensors: tuple[Tensor, ...]
    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], PackedMatrix]
    problem: str | None = None
    rounds_rows: bool = False
    any_dtype: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that the library keeps."""
        return sum(tensor.nbytes for tensor in self.tensors)


def scales_of_rows(scale: Tensor, outputs: int) -> Tensor:
    """One scale, or one a row, in any shape: float32 [outputs, 1]."""
    return scale.detach().float().reshape(-1, 1).expand(outputs, 1).contiguous()


def unread(name: str, problem: str, *tensors: Tensor) -> LibraryWeights:
    """Weights of a library that are not read; ``problem`` completes a sentence that begins with the module's name."""

    def read() -> PackedMatrix:
        raise ValueError(f"weight: {problem}")

    return LibraryWeights(name, tensors, torch.Size(), torch.float32, read, problem=problem)
