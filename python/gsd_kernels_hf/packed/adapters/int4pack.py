"""The order in which PyTorch's ``_weight_int4pack_mm_for_cpu`` has its codes, put back into rows.

64 outputs lie together where PyTorch uses AVX-512, 32 elsewhere; of an input they are half as many bytes, in whose low
half a code of the first outputs is. Outputs that are left over lie in twos (aten/src/ATen/native/cpu/int4mm_kernel.cpp
of torch 2.13). Whether this PyTorch does so is tried once.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from gsd_kernels.ops.packed import halves

from .base import Layout

TOGETHER = (64, 32)


def layout(packed: Tensor, scale_and_zero: Tensor) -> str | Layout:
    """Of bytes [outputs, inputs / 2] and numbers [groups, outputs, 2]: value = scale (code − 8) + zero."""
    if scale_and_zero.dtype not in (torch.bfloat16, torch.float16):
        return f"has scales of {scale_and_zero.dtype}, with which PyTorch rounds as the processor does"
    if packed.dim() != 2 or packed.dtype != torch.uint8:
        return f"has codes of {packed.dtype}, {list(packed.shape)}, in an order that is not known"
    if (order := order_of_outputs()) is None:
        return "has codes in an order of PyTorch's that is not known"
    inputs = 2 * packed.shape[1]
    return "int4_offset", lambda: (unpacked_rows(packed, inputs, order), *scale_and_zero.transpose(0, 1).unbind(-1))


def unpacked_rows(packed: Tensor, inputs: int, together: int) -> Tensor:
    """Rows of bytes, [outputs, inputs / 2]: the first weight of a byte in its low half."""
    outputs, half = packed.shape[0], together // 2
    whole = outputs // together * together
    flat = packed.reshape(-1)
    first = flat[: whole * inputs // 2].view(-1, inputs, half)  # [blocks, inputs, half]
    codes = halves.split(first[..., None]).permute(0, 3, 2, 1).reshape(whole, inputs)  # from [blocks, inputs, half, 2]
    rest = flat[whole * inputs // 2 :].view(inputs, -1)  # [inputs, outputs left / 2]
    return halves.join(torch.cat([codes, halves.split(rest).T]))


@lru_cache(maxsize=1)
def order_of_outputs() -> int | None:
    """How many outputs this PyTorch puts together, or ``None`` where it is none of :data:`TOGETHER`."""
    codes = torch.randint(0, 16, (2 * TOGETHER[0] + 16, 32), generator=torch.Generator().manual_seed(0), device="cpu")
    rows = halves.join(codes.to(torch.uint8))
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    except (AttributeError, RuntimeError):
        return None
    return next((n for n in TOGETHER if torch.equal(unpacked_rows(packed, codes.shape[1], n), rows)), None)
