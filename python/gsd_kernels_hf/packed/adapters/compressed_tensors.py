"""compressed-tensors: ``nn.Linear`` modules whose weights are integers. Read from compressed-tensors 0.20.

The library has no products for them: the model's first forward makes all of them dense. Before it they can be kept, see
:func:`gsd_kernels_hf.packed.keep.keep_packed`. In its format pack-quantized a row's codes lie in words of 32 bits, the
first in the lowest ones. Its int-quantized has bytes; activations of eight bits, where a model has them, are floats
again when they are multiplied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gsd_kernels.ops.packed import BY_NAME, PackedMatrix, halves

from .base import BY_BITS, LibraryWeights, scales_of_rows, unread

FORMAT = "pack-quantized"
BYTES = ("int-quantized", "naive-quantized")
"""Formats whose weights of eight bits are bytes."""


def stored(module: nn.Module) -> LibraryWeights | None:
    """Weights of a compressed linear layer, or ``None``."""
    packed: Any = module._parameters.get("weight_packed")
    scheme: Any = getattr(module, "quantization_scheme", None)
    if isinstance(module, nn.Linear) and scheme is not None and packed is None:
        return _bytes(module, scheme)
    if not isinstance(module, nn.Linear) or packed is None or "weight" in module._parameters:
        return None
    weights = getattr(scheme, "weights", None)
    form = _format(scheme)
    name, scale, zero = f"{form} of compressed-tensors", module._parameters["weight_scale"], _zero(module)
    tensors = tuple(t for t in (packed, scale, zero) if t is not None)
    problem = _problem(module, scheme, form)
    if problem is not None or weights is None or scale is None:
        return unread(name, problem or "has no scales", *tensors)
    outputs, inputs = module.out_features, module.in_features

    def read() -> PackedMatrix:
        kind, middle = BY_NAME[BY_BITS[weights.num_bits]], 1 << (weights.num_bits - 1)
        data = packed.detach().contiguous().view(torch.uint8)[:, : kind.row_bytes(inputs)].contiguous()
        scales = scale.detach().float().reshape(-1, scale.shape[-1] if scale.dim() == 2 else 1).expand(outputs, -1)
        zeros = torch.zeros_like(scales) if zero is None else _unpacked(zero, outputs, weights.num_bits).float()
        return PackedMatrix(kind, data, inputs, torch.stack([scales, zeros + (0 if zero is not None else middle)], -1))

    return LibraryWeights(name, tensors, torch.Size((outputs, inputs)), scale.dtype, read)


def _bytes(module: Any, scheme: Any) -> LibraryWeights | None:
    """Weights that are bytes, or ``None``; activations of eight bits may go with them."""
    codes: Any = module._parameters.get("weight")
    if codes is None or codes.dtype != torch.int8:
        return None
    form, scale = _format(scheme), module._parameters.get("weight_scale")
    name, tensors = f"{form} of compressed-tensors", tuple(t for t in (codes, scale, _zero(module)) if t is not None)
    problem = _problem_of_bytes(module, scheme, form)
    if problem is not None or scale is None:
        return unread(name, problem or "has no scales", *tensors)
    outputs, inputs = codes.shape

    def read() -> PackedMatrix:
        scales = scales_of_rows(scale, outputs)
        kind = "int8_rounded" if rounds_rows else "int8"
        return PackedMatrix(BY_NAME[kind], codes.detach().contiguous(), inputs, scales)

    rounds_rows = scheme.input_activations is not None
    return LibraryWeights(name, tensors, codes.shape, scale.dtype, read, rounds_rows=rounds_rows)


def _problem_of_bytes(module: Any, scheme: Any, form: str) -> str | None:
    if form not in BYTES:
        return f"is compressed as {form}"
    if _word(scheme.weights.strategy) not in ("tensor", "channel"):
        return f"has scales by {_word(scheme.weights.strategy)}"
    if not scheme.weights.symmetric or _zero(module) is not None:
        return "has zero points"
    if scheme.output_activations is not None:
        return "quantises what it computes"
    if not getattr(module, "quantization_enabled", True):
        return "has its quantisation switched off"
    rows = scheme.input_activations
    if rows is None:
        return None
    if _word(rows.type) != "int" or rows.num_bits != 8 or not rows.symmetric or rows.scale_dtype is not None:
        return "quantises its activations to something else than eight bits around 0"
    if rows.dynamic is not True or _word(rows.strategy) != "token":
        return f"quantises its activations by {_word(rows.strategy)}" + ("" if rows.dynamic else ", not dynamically")
    return None


def _word(value: Any) -> str:
    """Of an enumeration's member, or of text."""
    return str(getattr(value, "value", value))


def _format(scheme: Any) -> str:
    return _word(getattr(scheme, "format", None))


def release(model: nn.Module) -> None:
    """Nothing is left to be made dense at the model's first forward."""
    hook: Any = vars(model).pop("ct_decompress_hook", None)
    if hook is not None:
        hook.remove()


def _zero(module: nn.Module) -> Tensor | None:
    zero: Tensor | None = module._parameters.get("weight_zero_point")
    return zero


def _problem(module: Any, scheme: Any, form: str) -> str | None:
    if form != FORMAT:
        return f"is compressed as {form}"
    if scheme.input_activations is not None or scheme.output_activations is not None:
        return "quantises its activations"
    bits, strategy = scheme.weights.num_bits, _word(scheme.weights.strategy)
    if bits not in BY_BITS:
        return f"has codes of {bits} bits"
    if strategy not in ("tensor", "channel", "group"):
        return f"has scales by {strategy}"
    if module._parameters.get("weight_g_idx") is not None or module._buffers.get("weight_g_idx") is not None:
        return "has groups of inputs that do not lie together"
    scale = module._parameters["weight_scale"]
    groups = scale.shape[-1] if scale.dim() == 2 else 1
    if strategy == "tensor" and _zero(module) is not None:
        return "has one zero point for all weights"
    if module.in_features % (2 * groups):
        return f"has {groups} scales for {module.in_features} inputs"
    return None


def _unpacked(words: Tensor, outputs: int, bits: int) -> Tensor:
    """Codes uint8 [outputs, groups] of words [outputs · bits / 32, groups], which are packed along the outputs."""
    rows = words.detach().T.contiguous().view(torch.uint8)  # [groups, bytes]
    codes = halves.split(rows) if bits == 4 else rows
    return codes[:, :outputs].T
