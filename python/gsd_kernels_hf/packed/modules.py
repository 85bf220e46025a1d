"""Linear layers and embeddings over packed matrices."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from gsd_kernels.ops.packed import ROUNDING_KINDS, Kind, PackedMatrix, unpack_rows
from gsd_kernels.ops.row_linear import row_linear

from .adapters import LibraryWeights, stored_in
from .readonly import ReadOnly
from .samples import samples, versions


class Packed(nn.Module):
    """A module whose weights are one packed matrix. It is for inference: no gradient reaches the weights.

    Args:
        matrix: its tensors become the module's buffers, as they lie.
        dtype: of the weights that they stand for.

    Attributes:
        packed: the matrix's data.
        scales: what lies beside it, or ``None``.
        kind, inputs: of the matrix.
    """

    packed: Tensor
    scales: Tensor | None
    like: Tensor

    def __init__(self, matrix: PackedMatrix, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind: Kind = matrix.kind
        self.inputs: int = matrix.inputs
        self.register_buffer("packed", matrix.data)
        self.register_buffer("scales", matrix.scales)
        self.register_buffer(
            "like", torch.empty(0, dtype=dtype, device=matrix.data.device), persistent=False
        )  # goes where the model goes

    @property
    def matrix(self) -> PackedMatrix:
        """The matrix as it lies now."""
        return PackedMatrix(self.kind, self.packed, self.inputs, self.scales)

    @property
    def weight(self) -> Tensor:
        """The dense matrix, [outputs, inputs], unpacked anew at every access; what asks for a size asks the matrix.

        It is to be read: what would write to it raises ValueError.
        """
        return unpack_rows(self.matrix, dtype=self.like.dtype).as_subclass(ReadOnly)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise ValueError(
                f"weight: this layer's is packed ({self.kind.name}), so no other can be put in its place; change the "
                "dense model and pack it, or put a dense layer in this one's place"
            )
        super().__setattr__(name, value)

    def stand_in(self) -> None:
        """Have a parameter, though an empty one: a model asks its first for its dtype and device."""
        like = self.like
        del self.like
        self.like = nn.Parameter(like, requires_grad=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        scales = self.scales
        module = super()._apply(fn, recurse)
        if scales is not None and self.scales.dtype != scales.dtype:  # .to(dtype) is about what is computed
            self.scales = scales.to(self.scales.device)
        return module

    def extra_repr(self) -> str:
        outputs, inputs = self.matrix.shape
        return f"{inputs}, {outputs}, {self.kind.name}, {self.kind.bits:.2f} bits a weight"


class PackedLinear(Packed):
    """``nn.Linear`` over a packed matrix: x · weightᵀ + bias, in the dtype of ``x``.

    A row's result has the bits that the operator gives for the dense matrix, alone and among other rows.

    Args:
        matrix: [out_features, in_features].
        bias: [out_features], or ``None``.
        dtype: of the weights that the matrix stands for.
    """

    def __init__(self, matrix: PackedMatrix, dtype: torch.dtype, bias: Tensor | None = None) -> None:
        super().__init__(matrix, dtype)
        self.out_features, self.in_features = matrix.shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        """[…, in_features] → […, out_features]"""
        rows = input.reshape(-1, self.in_features)
        out = row_linear(rows, self.matrix) if len(rows) else rows.new_empty(0, self.out_features)
        out = out.view(*input.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


class PackedEmbedding(Packed):
    """``nn.Embedding`` over a packed matrix.

    Args:
        matrix: [num_embeddings, embedding_dim].
        dtype: of what is looked up.
        padding_idx: as in ``nn.Embedding``; no gradient is kept either way.
    """

    def __init__(self, matrix: PackedMatrix, dtype: torch.dtype, padding_idx: int | None = None) -> None:
        super().__init__(matrix, dtype)
        self.num_embeddings, self.embedding_dim = matrix.shape
        self.padding_idx = padding_idx

    def forward(self, input: Tensor) -> Tensor:
        """int […] → […, embedding_dim]"""
        rows = unpack_rows(self.matrix, input.reshape(-1).long(), dtype=self.like.dtype)
        return rows.view(*input.shape, self.embedding_dim)


def matrix_of(module: Any) -> Tensor | PackedMatrix:
    """The weights of a linear layer or an embedding as they lie, [outputs, inputs]."""
    if isinstance(module, Packed):
        return module.matrix
    if (stored := _readable(module)) is not None:
        return _read(module, stored)
    matrix: Tensor = module.weight.detach()
    return matrix


def _weights(module: Any) -> tuple[torch.dtype, torch.device, torch.Size]:
    """Of a linear layer or an embedding, without unpacking anything; see the three functions below."""
    if isinstance(module, Packed):
        return module.like.dtype, module.packed.device, torch.Size((module.packed.shape[0], module.inputs))
    weight = _readable(module) or module.weight
    return weight.dtype, (weight if isinstance(weight, Tensor) else weight.tensors[0]).device, weight.shape


def dtype_of(module: Any) -> torch.dtype:
    """Of the weights of a linear layer or an embedding, or of what they stand for."""
    return _weights(module)[0]


def device_of_weights(module: Any) -> torch.device:
    """Where the weights of a linear layer or an embedding lie."""
    return _weights(module)[1]


def shape_of(module: Any) -> torch.Size:
    """Of the weights of a linear layer or an embedding: outputs and inputs."""
    return _weights(module)[2]


def as_packed(module: nn.Module) -> Packed | None:
    """A module with packed weights: itself, or one over the weights of a library's; ``None`` for every other."""
    if isinstance(module, Packed):
        return module
    stored = _readable(module)
    return None if stored is None else linear_over(module, _read(module, stored), stored.dtype)


def linear_over(module: nn.Module, matrix: PackedMatrix, dtype: torch.dtype) -> PackedLinear:
    """A linear layer over the matrix that stands for ``module``, with that one's bias."""
    bias = getattr(module, "bias", None)
    return PackedLinear(matrix, dtype, None if bias is None else bias.detach())


def _readable(module: nn.Module) -> LibraryWeights | None:
    stored = stored_in(module)
    return None if stored is None or stored.problem is not None else stored


def rounds_rows(model: nn.Module) -> bool:
    """Return whether a layer rounds its rows to eight bits: an activation's last bit may become a whole code there."""
    for module in model.modules():
        if isinstance(module, Packed):
            if module.kind in ROUNDING_KINDS:
                return True
        elif (stored := _readable(module)) is not None and stored.rounds_rows:
            return True
    return False


def packed_in(model: nn.Module) -> list[Packed]:
    """The modules with packed weights."""
    return [module for module in model.modules() if isinstance(module, Packed)]


_copies: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], PackedMatrix]] = weakref.WeakKeyDictionary()
"""Packed matrices that had to be copied out of a library's order; each is made once, and beside the library's own."""


def _read(module: nn.Module, stored: LibraryWeights) -> PackedMatrix:
    """The module's matrix as it is now; a copy is made anew only when a tensor that it was made of was changed."""
    if (copy := _copies.get(module)) is not None and copy[0] == _content(stored):
        return copy[1]
    matrix = stored.read()
    if any(matrix.data.data_ptr() == tensor.data_ptr() for tensor in stored.tensors):
        _copies.pop(module, None)
    else:
        _copies[module] = _content(stored), matrix
    return matrix


def _content(stored: LibraryWeights) -> tuple[Any, ...]:
    tensors = stored.tensors
    return tuple(t.data_ptr() for t in tensors), versions(tensors), samples(tensors)


def copied_bytes(model: nn.Module) -> int:
    """Bytes of the copies of a model's matrices."""
    return sum(_copies[module][1].nbytes for module in model.modules() if module in _copies)


def forget_copies(model: nn.Module) -> None:
    """Let go of the copies of a model's matrices; who needs one makes it anew."""
    for module in model.modules():
        _copies.pop(module, None)
