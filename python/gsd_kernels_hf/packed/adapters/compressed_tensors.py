"""compressed-tensors: ``nn.Linear`` modules whose weights are integers. Read from compressed-tensors 0.20.

The library has no products for them: the model's first forward makes all of them dense. Before it they can be kept, see
:func:`gsd_kernels_hf.packed.pack.keep_packed`. In its format pack-quantized a row's codes lie in words of 32 bits, the
first in the lowest ones. Its int-quantized has bytes; activations of eight bits, where a model has them, are floats
again when they are multiplied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gsd_kernels.ops.packed import BY_NAME, PackedMatrix, halves

from .base import BY_BITS, LibraryWeights, scales_of_rows, unread

WORDS = ("pack-quantized",)
"""Formats whose weights lie in words of 32 bits."""
BYTES = ("int-quantized", "naive-quantized")
"""Formats whose weights of eight bits are bytes."""


def stored(module: nn.Module) -> LibraryWeights | None:
    """Weights of a compressed linear layer, or ``None``."""
    scheme, own = getattr(module, "quantization_scheme", None), module._parameters
    codes: Any = own.get("weight_packed", own.get("weight"))
    packed = "weight_packed" in own and "weight" not in own
    if not isinstance(module, nn.Linear) or codes is None or not (packed or (scheme and codes.dtype == torch.int8)):
        return None
    scale, zero = own.get("weight_scale"), own.get("weight_zero_point")
    form = _word(getattr(scheme, "format", None))
    name, tensors = f"{form} of compressed-tensors", tuple(t for t in (codes, scale, zero) if t is not None)
    weights, rows = getattr(scheme, "weights", None), getattr(scheme, "input_activations", None)
    if weights is None or scale is None:
        return unread(name, "has no scales", *tensors)
    if form not in (WORDS if packed else BYTES):
        return unread(name, f"is compressed as {form}", *tensors)
    problem = _problem(module, scheme, scale, zero) if packed else _problem_of_bytes(module, scheme, zero)
    if problem is not None:
        return unread(name, problem, *tensors)
    outputs, inputs = module.out_features, module.in_features

    def read() -> PackedMatrix:
        if not packed:
            kind = BY_NAME["int8" if rows is None else "int8_rounded"]
            return PackedMatrix(kind, codes.detach().contiguous(), inputs, scales_of_rows(scale, outputs))
        kind, middle = BY_NAME[BY_BITS[weights.num_bits]], 1 << (weights.num_bits - 1)
        data = codes.detach().contiguous().view(torch.uint8)[:, : kind.row_bytes(inputs)].contiguous()
        scales = scale.detach().float().reshape(-1, _groups(scale)).expand(outputs, -1)
        zeros = torch.full_like(scales, middle) if zero is None else _unpacked(zero, outputs, weights.num_bits).float()
        return PackedMatrix(kind, data, inputs, torch.stack([scales, zeros], -1))

    return LibraryWeights(
        name, tensors, torch.Size((outputs, inputs)), scale.dtype, read, rounds_rows=not packed and rows is not None
    )


def _problem_of_bytes(module: Any, scheme: Any, zero: Tensor | None) -> str | None:
    """Why weights that are bytes are not read; activations of eight bits may go with them."""
    if _word(scheme.weights.strategy) not in ("tensor", "channel"):
        return f"has scales by {_word(scheme.weights.strategy)}"
    if not scheme.weights.symmetric or zero is not None:
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


def release(model: nn.Module) -> None:
    """Nothing is left to be made dense at the model's first forward."""
    hook: Any = vars(model).pop("ct_decompress_hook", None)
    if hook is not None:
        hook.remove()


def _groups(scale: Tensor) -> int:
    """Scales of a row."""
    return scale.shape[-1] if scale.dim() == 2 else 1


def _problem(module: Any, scheme: Any, scale: Tensor, zero: Tensor | None) -> str | None:
    """Why weights in words of 32 bits are not read."""
    bits, strategy = scheme.weights.num_bits, _word(scheme.weights.strategy)
    if scheme.input_activations is not None or scheme.output_activations is not None:
        return "quantises its activations"
    if bits not in BY_BITS:
        return f"has codes of {bits} bits"
    if strategy not in ("tensor", "channel", "group"):
        return f"has scales by {strategy}"
    if getattr(module, "weight_g_idx", None) is not None:
        return "has groups of inputs that do not lie together"
    if strategy == "tensor" and zero is not None:
        return "has one zero point for all weights"
    if module.in_features % (2 * _groups(scale)):
        return f"has {_groups(scale)} scales for {module.in_features} inputs"
    return None


def _unpacked(words: Tensor, outputs: int, bits: int) -> Tensor:
    """Codes uint8 [outputs, groups] of words [outputs · bits / 32, groups], which are packed along the outputs."""
    rows = words.detach().T.contiguous().view(torch.uint8)  # [groups, bytes]
    codes = halves.split(rows) if bits == 4 else rows
    return codes[:, :outputs].T
