"""torchao: weights that are tensors of its own inside plain ``nn.Linear`` modules. Read from torchao 0.18."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gsd_kernels.ops.packed import BY_NAME, PackedMatrix
from gsd_kernels.ops.packed.matrix import MOST_CODES

from . import int4pack
from .base import LibraryWeights, scales_of_rows, unread


def stored(module: nn.Module) -> LibraryWeights | None:
    """Weights of a linear layer that torchao quantised, or ``None``."""
    weight: Any = module._parameters.get("weight")
    if not isinstance(module, nn.Linear) or not type(weight).__module__.startswith("torchao."):
        return None
    tensors = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
    read = READERS.get(type(weight).__name__)
    weights = f"is a {name_of(weight)}" if read is None else read(weight)
    return unread(name_of(weight), weights, *tensors) if isinstance(weights, str) else weights


def name_of(weight: Any) -> str:
    return f"{type(weight).__name__} of torchao"


def int8(weight: Any) -> LibraryWeights | str:
    """``Int8Tensor``: bytes [N, K], a scale for a tensor, a row or a group."""
    if weight.act_quant_scale is not None:
        return "quantises its activations with a scale of its own"
    if weight.act_pre_scale is not None:
        return "scales its activations"
    return bytes_of(weight) if weight.act_quant_kwargs is None else dynamic(weight)


def dynamic(weight: Any) -> LibraryWeights | str:
    """``Int8Tensor`` that is multiplied with activations of eight bits, which have a scale for each row."""
    how, (outputs, inputs), (rows, width) = weight.act_quant_kwargs, weight.qdata.shape, weight.block_size
    if type(how).__name__ != "QuantizeTensorToInt8Kwargs" or type(how.granularity).__name__ != "PerRow":
        return "quantises its activations with one scale for all rows"
    if how.mapping_type.name != "SYMMETRIC" or how.reduce_range:
        return f"quantises its activations to {'seven bits' if how.reduce_range else 'codes with a zero point'}"
    if rows not in (1, outputs) or width != inputs or inputs > MOST_CODES:
        return f"quantises its activations and has scales for blocks of {rows} × {width} weights"

    def read() -> PackedMatrix:
        scales = scales_of_rows(weight.scale, outputs)
        return PackedMatrix(BY_NAME["int8_dynamic"], weight.qdata.contiguous(), inputs, scales)

    name = f"{type(weight).__name__}, activations of eight bits, of torchao"
    return LibraryWeights(name, (weight.qdata, weight.scale), weight.qdata.shape, weight.dtype, read, rounds_rows=True)


def intx(weight: Any) -> LibraryWeights | str:
    """``IntxUnpackedToInt8Tensor``: codes of 1 to 8 bits in bytes, scales and zero points of groups."""
    return "quantises its activations" if weight.activation_quantization is not None else bytes_of(weight)


def bytes_of(weight: Any) -> LibraryWeights | str:
    """Codes in bytes; value = scale (code − zero)."""
    rows, width = weight.block_size
    outputs, inputs = weight.qdata.shape
    if rows not in (1, outputs) or inputs % width:
        return f"has scales for blocks of {rows} × {width} weights"
    zero = weight.zero_point
    if zero is not None and zero.is_floating_point() and bool((zero != zero.round()).any()):
        return "has zero points that are no integers"

    def by_group(values: Tensor) -> Tensor:
        wide = values.detach().reshape(-1, inputs // width).float()
        return wide.expand(outputs, -1).contiguous()  # one for all rows, or as it lies

    def read() -> PackedMatrix:
        codes = weight.qdata.contiguous()
        if zero is None or not zero.any():
            return PackedMatrix(BY_NAME["int8"], codes, inputs, by_group(weight.scale))
        # Bytes with a zero point begin at 0.
        pairs = torch.stack([by_group(weight.scale), by_group(zero) + 128], -1)
        return PackedMatrix(BY_NAME["uint8"], (codes.int() + 128).to(torch.uint8), inputs, pairs)

    tensors = tuple(t for t in (weight.qdata, weight.scale, zero) if t is not None)
    return LibraryWeights(name_of(weight), tensors, weight.qdata.shape, weight.dtype, read)


def int4(weight: Any) -> LibraryWeights | str:
    """``Int4OpaqueTensor``: codes in the order of PyTorch's product, which are put into rows."""
    if weight.act_mapping_type is not None:
        return "quantises its activations"
    if weight.act_pre_scale is not None:
        return "scales its activations"
    shape, packed, numbers = weight.shape, weight.qdata, weight.scale_and_zero
    if packed.shape[0] != shape[0]:
        return f"has {packed.shape[0]} rows of codes for {shape[0]} outputs"
    if (problem := int4pack.problem(packed, numbers)) is not None:
        return problem
    read = partial(int4pack.matrix, packed, numbers, shape[1])
    return LibraryWeights(name_of(weight), (packed, numbers), shape, weight.dtype, read)


READERS = {"Int8Tensor": int8, "IntxUnpackedToInt8Tensor": intx, "Int4OpaqueTensor": int4}
"""By the name of the tensor's class."""
