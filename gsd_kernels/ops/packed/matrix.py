from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .kinds import CODE_KINDS, Kind

MOST_CODES = (1 << 31) // (128 * 128) - 1
"""Inputs whose products of codes fit into 32 bits."""


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A matrix [outputs, inputs] of weights as it lies in a file or a module.

    It stands for the dense matrix that its format defines: every weight in float32, rounded once to the model's dtype.
    Kinds of :data:`~.kinds.CODE_KINDS` and :data:`~.kinds.ROUNDED_KINDS` are multiplied with rows that are rounded to
    eight bits too, see :mod:`.codes`.

    Attributes:
        kind: the format.
        data: uint8 [outputs, bytes of a row], or int8 [outputs, inputs] for ``int8`` and those; contiguous.
        inputs: weights of a row.
        scales: float32 [outputs, groups] where the kind has one number beside its rows for a group of inputs,
            [outputs, groups, 2] where it has two. Groups are of one size, an even one for codes of half a byte.

    Raises:
        TypeError, ValueError: the tensors are not of the format.
    """

    kind: Kind
    data: Tensor
    inputs: int
    scales: Tensor | None = None

    def __post_init__(self) -> None:
        width = self.kind.row_bytes(self.inputs)
        dtype = torch.int8 if self.kind.signed else torch.uint8
        if self.data.dtype != dtype:
            raise TypeError(f"data: {self.kind.name} lies in {dtype}, got {self.data.dtype}")
        if self.data.dim() != 2 or self.data.shape[1] != width or not self.data.is_contiguous():
            raise ValueError(
                f"data: {self.kind.name} with {self.inputs} inputs lies in contiguous rows of {width} bytes, got "
                f"{list(self.data.shape)}"
            )
        if self.kind.beside:
            self._check_scales()
        elif self.scales is not None:
            raise ValueError(f"scales: those of {self.kind.name} are in its blocks; leave them out")

    def _check_scales(self) -> None:
        scales, outputs = self.scales, self.data.shape[0]
        if scales is None or scales.dtype != torch.float32:
            raise TypeError(f"scales: {self.kind.name} needs float32, got {getattr(scales, 'dtype', None)}")
        shape, rest = list(scales.shape), [] if self.kind.beside == 1 else [self.kind.beside]
        groups = shape[1] if len(shape) == 2 + len(rest) else 0
        divided = groups > 0 and self.inputs % (groups * self.kind.weights) == 0
        if not divided or shape != [outputs, groups, *rest] or not scales.is_contiguous():
            expected = ", ".join(map(str, [outputs, f"groups that divide {self.inputs}", *rest]))
            raise ValueError(f"scales: expected [{expected}], contiguous, got {shape}")
        if self.kind in CODE_KINDS and (groups != 1 or self.inputs > MOST_CODES):
            raise ValueError(
                f"scales: {self.kind.name} has one for a row of at most {MOST_CODES} inputs, got {shape} for "
                f"{self.inputs}"
            )

    @property
    def outputs(self) -> int:
        """Rows."""
        return self.data.shape[0]

    @property
    def shape(self) -> torch.Size:
        """Of the dense matrix."""
        return torch.Size((self.outputs, self.inputs))

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)
