"""The parameters that decoder_rows reads."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..packed import PackedMatrix, codes, unpack_rows

DENSE = -1  # the number of a matrix that is no packed one
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class LayerWeights:
    """One layer's parameters as they lie in the model, matrices dense or packed; D is the head size."""

    input_norm: Tensor  # [hidden]
    q: Tensor | PackedMatrix  # [heads · D, hidden]
    k: Tensor | PackedMatrix  # [kv_heads · D, hidden]
    v: Tensor | PackedMatrix
    o: Tensor | PackedMatrix  # [hidden, heads · D]
    second_norm: Tensor  # [hidden]
    gate: Tensor | PackedMatrix  # [inner, hidden]
    up: Tensor | PackedMatrix
    down: Tensor | PackedMatrix  # [hidden, inner]
    q_bias: Tensor | None = None  # [outputs], as the others
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [D], of every head before it is turned
    k_norm: Tensor | None = None
    window: int = 0  # positions that a row sees, itself among them; 0: all

    @property
    def tensors(self) -> list[Tensor]:
        """All of them in order, empty ones for those that there are not."""
        nothing = self.input_norm.new_empty(0)
        return [nothing if value is None else stored(value) for value in self.named.values()]

    @property
    def named(self) -> dict[str, Tensor | PackedMatrix | None]:
        """All of them by name, in order."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "window"}


@dataclass(frozen=True)
class DecoderWeights:
    """The parameters of a LLaMA-like decoder, as they lie in the model; nothing is copied.

    Packed matrices stand for dense ones of the final norm's dtype. Those whose rows are rounded first are
    multiplied as their library does it, in that dtype; the embedding is none of those.
    """

    embedding: Tensor | PackedMatrix  # [V, hidden]
    layers: list[LayerWeights]
    final_norm: Tensor  # [hidden]
    head: Tensor | PackedMatrix  # [V, hidden]
    inv_freq: Tensor  # float32 [D/2], of the rotary embedding
    rope_scale: float  # of its cosines and sines
    heads: int  # query heads
    eps: float  # of the norms

    @cached_property
    def flat_layers(self) -> list[Tensor]:
        return [t for layer in self.layers for t in layer.tensors]

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type that rows are multiplied in."""
        return self.embedding.dtype if isinstance(self.embedding, Tensor) else self.final_norm.dtype

    @cached_property
    def matrices(self) -> list[Tensor | PackedMatrix]:
        """The embedding, the output matrix, and :data:`MATRICES` of every layer."""
        of_layers = [getattr(layer, name) for layer in self.layers for name in MATRICES]
        return [self.embedding, self.head, *of_layers]

    @cached_property
    def packing(self) -> tuple[list[int], list[Tensor]]:
        """Numbers of kinds and scales of :attr:`matrices`; both are empty where all are dense."""
        if not any(isinstance(matrix, PackedMatrix) for matrix in self.matrices):
            return [], []
        nothing = self.inv_freq.new_empty(0)
        packed = [matrix if isinstance(matrix, PackedMatrix) else None for matrix in self.matrices]
        kinds = [DENSE if matrix is None else matrix.kind.number for matrix in packed]
        scales = [nothing if matrix is None or matrix.scales is None else matrix.scales for matrix in packed]
        return kinds, scales

    @property
    def places(self) -> list[int]:
        """Addresses of everything that a product reads."""
        ends = stored(self.embedding), stored(self.head)
        tensors = (*ends, self.final_norm, self.inv_freq, *self.flat_layers, *self.packing[1])
        return [tensor.data_ptr() for tensor in tensors]

    def dense(self) -> DecoderWeights:
        """The same with all matrices unpacked, but those whose rows are rounded first."""

        def of(matrix: Tensor | PackedMatrix) -> Tensor | PackedMatrix:
            if isinstance(matrix, Tensor) or matrix.kind.name in codes.LINEARS:
                return matrix
            return unpack_rows(matrix, dtype=self.dtype, backend="reference")

        layers = [replace(layer, **{name: of(getattr(layer, name)) for name in MATRICES}) for layer in self.layers]
        return replace(self, embedding=of(self.embedding), head=of(self.head), layers=layers)

    @cached_property
    def windows(self) -> list[int]:
        return [layer.window for layer in self.layers]

    def before_layers(self) -> tuple[Any, ...]:
        """Of an operator's arguments the embedding, the layers, and how they are packed."""
        return stored(self.embedding), self.flat_layers, *self.packing

    def behind_layers(self, k_caches: list[Tensor], v_caches: list[Tensor]) -> tuple[Any, ...]:
        """The arguments from the norm behind the layers on, up to what only one operator has."""
        output = self.final_norm, stored(self.head), self.inv_freq
        return *output, k_caches, v_caches, self.windows, self.heads, self.eps, self.rope_scale


def stored(matrix: Tensor | PackedMatrix) -> Tensor:
    """The tensor that a matrix lies in."""
    return matrix if isinstance(matrix, Tensor) else matrix.data
