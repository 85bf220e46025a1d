"""Linear layers and embeddings over packed matrices."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as nested

from gsd_kernels.ops.packed import Kind, PackedMatrix, unpack_rows
from gsd_kernels.ops.row_linear import row_linear

from .adapters import bitsandbytes, compressed_tensors, gptqmodel, torchao
from .adapters.base import Stored
from .samples import samples, versions

LIBRARIES = (torchao, bitsandbytes, compressed_tensors, gptqmodel)
"""Each describes a linear layer's weights, or says ``None`` where they are not its own."""


IN_PLACE = {f"__i{name}__" for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()}
WRITES = {"__setitem__", "__set__", "__delete__", *IN_PLACE}


class ReadOnly(Tensor):
    """Refuses to be written to, itself and every view of it; what is computed from it is a tensor like any other.

    What is made anew at every access would lose what is written to it without a word.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` unless it writes to one of these."""
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        written = [given.get("out")]
        # nn.Parameter calls requires_grad_.
        in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        if in_place or name in WRITES or given.get("inplace"):
            written += [*args, *given.values()][:1]
        if any(isinstance(value, ReadOnly) for value in nested.tree_leaves(written)):
            raise ValueError(
                f"weight: {name} would write to a packed layer's weight, which is unpacked anew at every access; "
                "write to weight.clone(), or change the dense model and pack it"
            )
        with torch._C.DisableTorchFunctionSubclass():
            held = [value for value in nested.tree_leaves((args, given)) if isinstance(value, ReadOnly)]
            storages = {tensor.untyped_storage().data_ptr() for tensor in held}
            result = func(*args, **given)
            if isinstance(result, torch.Size):  # a map of it would be a tuple
                return result
            return nested.tree_map(lambda value: kept(value, storages), result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def kept(result: Any, storages: set[int]) -> Any:
    """A value that a function returned, read only where it shares storage with what it was given."""
    if isinstance(result, np.ndarray):
        result.flags.writeable = False
    if not isinstance(result, Tensor):
        return result
    return result.as_subclass(ReadOnly if result.untyped_storage().data_ptr() in storages else Tensor)


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


def packed_layer(module: nn.Module, matrix: PackedMatrix, dtype: torch.dtype) -> Packed:
    """The embedding or linear layer over a matrix that is to stand for ``module``, with that one's bias."""
    if isinstance(module, nn.Embedding):
        return PackedEmbedding(matrix, dtype, module.padding_idx)
    bias = getattr(module, "bias", None)
    return PackedLinear(matrix, dtype, None if bias is None else bias.detach())


def stored_in(module: Any) -> Stored | None:
    """How a linear layer or an embedding, of ours or a library's, keeps its weights; ``None`` where they are dense."""
    if isinstance(module, Packed):
        data, scales, name = module.packed, module.scales, module.kind.name
        tensors = (data,) if scales is None else (data, scales)
        shape = torch.Size((data.shape[0], module.inputs))
        return Stored(shape, name, tensors, module.like.dtype, (name, lambda: tensors))
    if isinstance(module, torch.jit.ScriptModule):
        return None
    weight = module._parameters.get("weight")
    if type(weight) is nn.Parameter and weight.is_floating_point():  # dense, as most are; asked often
        return None
    if not module._parameters and not module._buffers:  # as parts that hold others
        return None
    found = next((found for library in LIBRARIES if (found := library.described(module)) is not None), None)
    return None if found is None else Stored(torch.Size((module.out_features, module.in_features)), *found)


def _weights(module: Any) -> Tensor | Stored:
    """A dense tensor, or what is read in its place: either has a shape, a dtype and a device."""
    if (stored := stored_in(module)) is not None and stored.problem is None:
        return stored
    weight: Tensor = module.weight
    return weight


def matrix_of(module: Any) -> Tensor | PackedMatrix:
    """The weights of a linear layer or an embedding as they lie, [outputs, inputs].

    A copy of a library's is made anew only when a tensor that it was made of was changed.
    """
    if isinstance(module, Packed):
        return module.matrix
    stored = _weights(module)
    if isinstance(stored, Tensor):
        return stored.detach()
    if (copy := _copies.get(module)) is not None and copy[0] == _content(stored.tensors):
        return copy[1]
    read = stored.read()
    if any(read.data.data_ptr() == tensor.data_ptr() for tensor in stored.tensors):
        _copies.pop(module, None)
    else:
        _copies[module] = _content(stored.tensors), read
    return read


def _content(tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors), versions(tensors), samples(tensors)


def dtype_of(module: Any) -> torch.dtype:
    """Of the weights of a linear layer or an embedding, or of what they stand for."""
    return _weights(module).dtype


def device_of_weights(module: Any) -> torch.device:
    """Where the weights of a linear layer or an embedding lie."""
    return _weights(module).device


def shape_of(module: Any) -> torch.Size:
    """Of the weights of a linear layer or an embedding: outputs and inputs."""
    return _weights(module).shape


def unpacked(module: nn.Module) -> Tensor | None:
    """The dense matrix of a module whose weights are packed; ``None`` for every other."""
    stored = stored_in(module)
    if stored is None or stored.problem is not None:
        return None
    return unpack_rows(matrix_of(module), dtype=stored.dtype)


def rounds_rows(model: nn.Module) -> bool:
    """Return whether a layer rounds its rows to eight bits: an activation's last bit may become a whole code there."""
    return any(stored is not None and stored.rounds_rows for stored in map(stored_in, model.modules()))


def packed_in(model: nn.Module) -> list[Packed]:
    """The modules with packed weights."""
    return [module for module in model.modules() if isinstance(module, Packed)]


_copies: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], PackedMatrix]] = weakref.WeakKeyDictionary()
"""Packed matrices that had to be copied out of a library's order; each is made once, and beside the library's own."""


def copied_bytes(model: nn.Module) -> int:
    """Bytes of the copies of a model's matrices."""
    return sum(_copies[module][1].nbytes for module in model.modules() if module in _copies)


def forget_copies(model: nn.Module) -> None:
    """Let go of the copies of a model's matrices; who needs one makes it anew."""
    for module in model.modules():
        _copies.pop(module, None)
