"""torchao: weights that are tensors of its own inside plain ``nn.Linear`` modules. Read from torchao 0.18."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gsd_kernels.ops.packed.matrix import MOST_CODES

from . import int4pack
from .base import Described, Layout


def described(module: nn.Module) -> Described | None:
    """Weights of a linear layer that torchao quantised, or ``None``."""
    weight: Any = module._parameters.get("weight")
    if not isinstance(module, nn.Linear) or not type(weight).__module__.startswith("torchao."):
        return None
    name = f"{type(weight).__name__} of torchao"
    tensors = tuple(getattr(weight, of) for of in weight.__tensor_flatten__()[0])
    read = READERS.get(type(weight).__name__)
    return name, tensors, weight.dtype, f"is a {name}" if read is None else read(weight)


def int8(weight: Any) -> str | Layout:
    """``Int8Tensor``: bytes [N, K], a scale for a tensor, a row or a group."""
    if weight.act_quant_scale is not None:
        return "quantises its activations with a scale of its own"
    if weight.act_pre_scale is not None:
        return "scales its activations"
    return bytes_of(weight) if weight.act_quant_kwargs is None else dynamic(weight)


def dynamic(weight: Any) -> str | Layout:
    """``Int8Tensor`` that is multiplied with activations of eight bits, which have a scale for each row."""
    how, (outputs, inputs), (rows, width) = weight.act_quant_kwargs, weight.qdata.shape, weight.block_size
    if type(how).__name__ != "QuantizeTensorToInt8Kwargs" or type(how.granularity).__name__ != "PerRow":
        return "quantises its activations with one scale for all rows"
    if how.mapping_type.name != "SYMMETRIC" or how.reduce_range:
        return f"quantises its activations to {'seven bits' if how.reduce_range else 'codes with a zero point'}"
    if rows not in (1, outputs) or width != inputs or inputs > MOST_CODES:
        return f"quantises its activations and has scales for blocks of {rows} × {width} weights"
    return "int8_dynamic", lambda: (weight.qdata, weight.scale.reshape(-1, 1))


def intx(weight: Any) -> str | Layout:
    """``IntxUnpackedToInt8Tensor``: codes of 1 to 8 bits in bytes, scales and zero points of groups."""
    return "quantises its activations" if weight.activation_quantization is not None else bytes_of(weight)


def bytes_of(weight: Any) -> str | Layout:
    """Codes in bytes; value = scale (code − zero)."""
    (rows, width), (outputs, inputs), zero = weight.block_size, weight.qdata.shape, weight.zero_point
    if rows not in (1, outputs) or inputs % width:
        return f"has scales for blocks of {rows} × {width} weights"
    if zero is not None and zero.is_floating_point() and bool((zero != zero.round()).any()):
        return "has zero points that are no integers"

    def made() -> tuple[Tensor, ...]:
        numbers = (weight.scale,) if zero is None or not zero.any() else (weight.scale, zero)
        return weight.qdata, *(number.reshape(-1, inputs // width) for number in numbers)

    return "int8", made


def int4(weight: Any) -> str | Layout:
    """``Int4OpaqueTensor``: codes in the order of PyTorch's product, which are put into rows."""
    if weight.act_mapping_type is not None:
        return "quantises its activations"
    if weight.act_pre_scale is not None:
        return "scales its activations"
    if len(weight.qdata) != weight.shape[0]:
        return f"has {len(weight.qdata)} rows of codes for {weight.shape[0]} outputs"
    return int4pack.layout(weight.qdata, weight.scale_and_zero)


READERS = {"Int8Tensor": int8, "IntxUnpackedToInt8Tensor": intx, "Int4OpaqueTensor": int4}
"""By the name of the tensor's class."""
