"""gptqmodel: GPTQ and AWQ layers of its own on a CPU. Read from gptqmodel 7.7.

Codes of four or eight bits lie in words of 32, along the inputs (GPTQ) or along the outputs (AWQ). What multiplies
through PyTorch's ``_weight_int4pack_mm_for_cpu`` puts them into that function's order at the first forward and rounds
scales and offsets to the dtype of the activations: the model is another one from there on, which the matrix follows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from gsd_kernels.ops.packed import halves

from . import int4pack
from .base import BY_BITS, Described, Layout

AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs of a word's half bytes, the lowest first."""


def described(module: Any) -> Described | None:
    """Weights of a linear layer of gptqmodel, or ``None``."""
    if not type(module).__module__.startswith("gptqmodel.") or not isinstance(getattr(module, "qweight", None), Tensor):
        return None
    name = f"{type(module).__name__} of gptqmodel"
    # Scales and offsets in the order of PyTorch's product, once a layer was put into that.
    numbers = module.scales_and_zeros if getattr(module, "_cpu_transformed", False) else None
    tensors = tuple(t for t in (module.qweight, module.qzeros, module.scales, numbers) if t is not None)
    how = _how(module, numbers) if type(module).__name__ in READERS else f"is a {name}"
    return name, tensors, module.scales.dtype, how


def _how(module: Any, numbers: Tensor | None) -> str | Layout:
    """Of a layer of a class in :data:`READERS`."""
    groups, made = len(module.scales), READERS[type(module).__name__]
    if getattr(module, "adapter", None) is not None:
        return "has an adapter"
    if getattr(module, "online_full_had", False) or getattr(module, "online_partial_had", False):
        return "turns its activations"
    if module.bits not in BY_BITS:
        return f"has codes of {module.bits} bits"
    order = getattr(module, "g_idx", None)
    in_order = torch.arange(module.in_features, dtype=torch.int32, device="cpu") // (module.in_features // groups)
    if module.in_features % groups or (order is not None and not torch.equal(order.cpu().int(), in_order)):
        return "has groups of inputs that do not lie together"
    if numbers is not None:
        return int4pack.layout(module.qweight, numbers)
    rows = (module.in_features, module.out_features // 8 * module.bits // 4)
    if made is awq and module.bits != 4:
        return "has AWQ's codes of eight bits"
    if made is gptq:
        rows = (module.in_features // 8 * module.bits // 4, module.out_features)
        if module.qzero_format() != 2:
            return "has zero points of GPTQ's first format"
    if tuple(module.qweight.shape) != rows or module.qweight.dtype != torch.int32:
        return f"has words of {module.qweight.dtype}, {list(module.qweight.shape)}"
    return BY_BITS[module.bits], partial(made, module)


def gptq(module: Any) -> tuple[Tensor, ...]:
    """Words [inputs · bits / 32, outputs]; value = scale (code − zero)."""
    data = module.qweight.T.contiguous().view(torch.uint8)  # bytes of a word follow each other, the lowest first
    zeros = _codes(module.qzeros) if module.bits == 4 else module.qzeros.view(torch.uint8)
    return data, module.scales.T, zeros.T


def awq(module: Any) -> tuple[Tensor, ...]:
    """Words [inputs, outputs / 8]; value = scale (code − zero)."""
    codes, zeros = (_in_order(_codes(words)) for words in (module.qweight, module.qzeros))
    return halves.join(codes.T), module.scales.T, zeros.T


def _codes(words: Tensor) -> Tensor:
    """Half bytes of words [rows, n], the lowest first: uint8 [rows, 8 n]."""
    return halves.split(words.contiguous().view(torch.uint8))


def _in_order(codes: Tensor) -> Tensor:
    places = torch.tensor([AWQ.index(i) for i in range(8)], dtype=torch.int64, device=codes.device)
    return codes.unflatten(1, (-1, 8))[..., places].flatten(1)


READERS = {"TorchLinear": gptq, "TorchAtenLinear": gptq, "AwqTorchLinear": awq, "TorchAtenAwqLinear": awq}
"""By the name of the layer's class: those whose products are dense ones over these values."""
