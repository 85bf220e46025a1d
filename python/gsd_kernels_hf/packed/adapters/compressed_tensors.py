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

from gsd_kernels.ops.packed import halves

from .base import BY_BITS, Described, Layout

WORDS = ("pack-quantized",)
"""Formats whose weights lie in words of 32 bits."""
BYTES = ("int-quantized", "naive-quantized")
"""Formats whose weights of eight bits are bytes."""


def described(module: nn.Module) -> Described | None:
    """Weights of a compressed linear layer, or ``None``."""
    scheme, own = getattr(module, "quantization_scheme", None), module._parameters
    codes = own.get("weight_packed", own.get("weight"))
    packed = "weight_packed" in own and "weight" not in own
    if not isinstance(module, nn.Linear) or codes is None or not (packed or (scheme and codes.dtype == torch.int8)):
        return None
    scale, zero, form = own.get("weight_scale"), own.get("weight_zero_point"), _word(getattr(scheme, "format", None))
    tensors = tuple(tensor for tensor in (codes, zero, scale) if tensor is not None)
    how: str | Layout
    if scale is None or getattr(scheme, "weights", None) is None:
        how = "has no scales"
    elif form not in (WORDS if packed else BYTES):
        how = f"is compressed as {form}"
    else:
        how = (_words if packed else _bytes)(module, scheme, codes, scale, zero)
    return f"{form} of compressed-tensors", tensors, tensors[-1].dtype, how


def _bytes(module: Any, scheme: Any, codes: Tensor, scale: Tensor, zero: Tensor | None) -> str | Layout:
    """Weights that are bytes; activations of eight bits may go with them."""
    strategy, rows = _word(scheme.weights.strategy), scheme.input_activations
    if strategy not in ("tensor", "channel"):
        return f"has scales by {strategy}"
    if not scheme.weights.symmetric or zero is not None:
        return "has zero points"
    if scheme.output_activations is not None:
        return "quantises what it computes"
    if not getattr(module, "quantization_enabled", True):
        return "has its quantisation switched off"
    if rows is not None:
        if _word(rows.type) != "int" or rows.num_bits != 8 or not rows.symmetric or rows.scale_dtype is not None:
            return "quantises its activations to something else than eight bits around 0"
        if rows.dynamic is not True or _word(rows.strategy) != "token":
            how = "" if rows.dynamic else ", not dynamically"
            return f"quantises its activations by {_word(rows.strategy)}{how}"
    return "int8" if rows is None else "int8_rounded", lambda: (codes, scale.reshape(-1, 1))


def _words(module: Any, scheme: Any, codes: Tensor, scale: Tensor, zero: Tensor | None) -> str | Layout:
    """Weights in words of 32 bits."""
    bits, strategy = scheme.weights.num_bits, _word(scheme.weights.strategy)
    groups = scale.shape[-1] if scale.dim() == 2 else 1  # of a row
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
    if module.in_features % (2 * groups):
        return f"has {groups} scales for {module.in_features} inputs"

    def made() -> tuple[Tensor, ...]:
        outputs, scales = module.out_features, scale.reshape(-1, groups)
        data = codes.contiguous().view(torch.uint8)[:, : module.in_features * bits // 8]
        zeros = torch.full_like(scales, 1 << (bits - 1)) if zero is None else _unpacked(zero, outputs, bits)
        return data, scales, zeros

    return BY_BITS[bits], made


def _word(value: Any) -> str:
    """Of an enumeration's member, or of text."""
    return str(getattr(value, "value", value))


def release(model: nn.Module) -> None:
    """Nothing is left to be made dense at the model's first forward."""
    hook: Any = vars(model).pop("ct_decompress_hook", None)
    if hook is not None:
        hook.remove()


def _unpacked(words: Tensor, outputs: int, bits: int) -> Tensor:
    """Codes uint8 [outputs, groups] of words [outputs · bits / 32, groups], which are packed along the outputs."""
    rows = words.T.contiguous().view(torch.uint8)  # [groups, bytes]
    codes = halves.split(rows) if bits == 4 else rows
    return codes[:, :outputs].T
