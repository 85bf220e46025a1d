"""compressed-tensors: ``nn.Linear`` modules in its format pack-quantized. Read from compressed-tensors 0.20.

The library has no products for them: the model's first forward makes all of them dense. Before it they can be kept, see
:func:`gsd_kernels_hf.packed.keep.keep_packed`. A row's codes lie in words of 32 bits, the first in the lowest ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gsd_kernels.ops.packed import BY_NAME, PackedMatrix, halves

from .base import BY_BITS, Stored, unread

FORMAT = "pack-quantized"


def stored(module: nn.Module) -> Stored | None:
    """Weights of a compressed linear layer, or ``None``."""
    packed: Any = module._parameters.get("weight_packed")
    if not isinstance(module, nn.Linear) or packed is None or "weight" in module._parameters:
        return None
    scheme: Any = getattr(module, "quantization_scheme", None)
    weights = getattr(scheme, "weights", None)
    found = str(getattr(getattr(scheme, "format", None), "value", getattr(scheme, "format", None)))
    name, scale, zero = f"{found} of compressed-tensors", module._parameters["weight_scale"], _zero(module)
    tensors = tuple(t for t in (packed, scale, zero) if t is not None)
    problem = _problem(module, scheme, found)
    if problem is not None or weights is None or scale is None:
        return unread(name, problem or "has no scales", *tensors)
    outputs, inputs = module.out_features, module.in_features

    def read() -> PackedMatrix:
        kind, middle = BY_NAME[BY_BITS[weights.num_bits]], 1 << (weights.num_bits - 1)
        data = packed.detach().contiguous().view(torch.uint8)[:, : kind.row_bytes(inputs)].contiguous()
        scales = scale.detach().float().reshape(-1, scale.shape[-1] if scale.dim() == 2 else 1).expand(outputs, -1)
        zeros = torch.zeros_like(scales) if zero is None else _unpacked(zero, outputs, weights.num_bits).float()
        return PackedMatrix(kind, data, inputs, torch.stack([scales, zeros + (0 if zero is not None else middle)], -1))

    return Stored(name, tensors, torch.Size((outputs, inputs)), scale.dtype, read)


def release(model: nn.Module) -> None:
    """Nothing is left to be made dense at the model's first forward."""
    hook: Any = vars(model).pop("ct_decompress_hook", None)
    if hook is not None:
        hook.remove()


def _zero(module: nn.Module) -> Tensor | None:
    zero: Tensor | None = module._parameters.get("weight_zero_point")
    return zero


def _problem(module: Any, scheme: Any, found: str) -> str | None:
    if found != FORMAT:
        return f"is compressed as {found}"
    if scheme.input_activations is not None or scheme.output_activations is not None:
        return "quantises its activations"
    bits, strategy = scheme.weights.num_bits, str(getattr(scheme.weights.strategy, "value", scheme.weights.strategy))
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
