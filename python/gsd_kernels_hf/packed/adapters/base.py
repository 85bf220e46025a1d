"""The weights of a linear layer or an embedding that are no dense tensor, as an adapter describes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gsd_kernels.ops.packed import BY_NAME, ROUNDING_KINDS, PackedMatrix

BY_BITS = {4: "int4", 8: "uint8"}
"""Kinds of codes with zero points, by the bits of a code."""

Layout = tuple[str, Callable[[], tuple[Tensor, ...]]]
"""The kind of a packed matrix, and what makes its codes and the one or two numbers beside its rows.

A number is [outputs or 1, groups] of any type: a scale, a zero point, with which ``int8`` becomes ``uint8``. Codes are
the library's own storage where rows lie there one after the other.
"""
Described = tuple[str, tuple[Tensor, ...], torch.dtype, str | Layout]
"""What an adapter says: see the attributes of :class:`Stored`."""


class Stored(NamedTuple):
    """Weights as a module keeps them, and how they are read as a packed matrix.

    The matrix stands for what a library's own dequantisation gives, bit for bit, in :attr:`dtype`.

    Attributes:
        shape: of the dense matrix, outputs and inputs.
        name: of the format, and of the library.
        tensors: all that the matrix depends on.
        dtype: that the library dequantises to.
        how: they are read; or why they are not, which completes a sentence that begins with the module's name.
    """

    shape: torch.Size
    name: str
    tensors: tuple[Tensor, ...]
    dtype: torch.dtype
    how: str | Layout

    @property
    def problem(self) -> str | None:
        """Why they are not read; ``None``: they can be."""
        return self.how if isinstance(self.how, str) else None

    @property
    def kind(self) -> str | None:
        """Of the matrix, by name."""
        return None if isinstance(self.how, str) else self.how[0]

    @property
    def rounds_rows(self) -> bool:
        """Say whether rows are rounded to eight bits before they are multiplied."""
        return any(kind.name == self.kind for kind in ROUNDING_KINDS)

    @property
    def any_dtype(self) -> bool:
        """Say whether a model of any dtype has the layer: what is multiplied has that of the rows."""
        return self.kind == "int8_vectorwise"

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.tensors[0].device

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def read(self) -> PackedMatrix:
        """The packed matrix.

        Raises:
            ValueError: there is a problem.
        """
        if isinstance(self.how, str):
            raise ValueError(f"weight: {self.how}")
        kind, made = self.how
        outputs, inputs = self.shape
        data, *numbers = (tensor.detach() for tensor in made())
        numbers = [number.float().expand(outputs, -1) for number in numbers]
        if kind == "int8" and len(numbers) > 1:  # bytes with a zero point begin at 0
            kind, data, numbers[1] = "uint8", (data.int() + 128).to(torch.uint8), numbers[1] + 128
        scales = torch.stack(numbers, -1) if len(numbers) > 1 else numbers[0]
        return PackedMatrix(BY_NAME[kind], data.contiguous(), inputs, scales.contiguous())
