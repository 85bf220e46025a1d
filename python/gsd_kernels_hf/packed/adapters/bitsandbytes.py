"""bitsandbytes: linear layers of its own over nf4, fp4 or int8. Read from bitsandbytes 0.50.

Of four bits a byte has two codes, the first weight's in its high half; a block of 64 or so weights has a scale, which
may be quantised itself. On a CPU with AVX512_BF16 the first forward in evaluation mode rewrites both in place, see
:func:`in_rows`, and rounds the scales to bfloat16: the model is another one from there on, which the matrix follows.

int8 is LLM.int8() (arXiv 2208.07339): rows are rounded to codes too, and integers are multiplied. Above a threshold of
0 whole columns of activations are left out of that and multiplied as floats, wherever one row of a forward has a value
beyond the threshold. A row's result then depends on the rows beside it, so there is no product of a row to be read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gsd_kernels.ops.packed import halves
from gsd_kernels.ops.packed.matrix import MOST_CODES

from .base import Described, Layout

ROWS = 32  # that are rewritten together


def described(module: nn.Module) -> Described | None:
    """Weights of a linear layer of bitsandbytes, or ``None``."""
    weight: Any = module._parameters.get("weight")
    if not isinstance(module, nn.Linear) or not type(weight).__module__.startswith("bitsandbytes."):
        return None
    if type(module).__name__ == "Linear8bitLt":
        return _int8(module, weight)
    name = f"{type(weight).__name__} of bitsandbytes"
    if type(weight).__name__ != "Params4bit":
        return name, (weight,), weight.dtype, f"is a {type(module).__name__} of bitsandbytes"
    state: Any = weight.quant_state or getattr(module, "quant_state", None)
    if state is None:
        return name, (weight,), weight.dtype, "is not quantised yet"
    nested = (state.absmax, state.state2.absmax, state.offset) if state.nested else (state.absmax,)
    return f"{state.quant_type} of bitsandbytes", (weight, *nested), state.dtype, _by_blocks(weight, state)


def _by_blocks(weight: Any, state: Any) -> str | Layout:
    """Codes of four bits."""
    if len(state.shape) != 2 or state.shape[1] % state.blocksize:
        # Whose dequantisation goes by rows on one processor and by weights on another.
        return f"is {list(state.shape)} in blocks of {state.blocksize} that do not end with its rows"
    outputs, inputs = state.shape

    def made() -> tuple[Tensor, ...]:
        if getattr(state, "packing_format_for_cpu", False):
            return in_rows(weight.data, inputs), state.absmax.T  # [groups, outputs] before
        scales = state.absmax
        if state.nested:
            from bitsandbytes.functional import dequantize_blockwise

            scales = dequantize_blockwise(scales, state.state2) + state.offset
        return weight.data.view(torch.uint8).view(outputs, inputs // 2), scales.view(outputs, -1)

    return state.quant_type, made


def threshold_of(module: Any) -> float:
    """Beyond which a value takes its column out of the integer product of all rows of a forward; 0: none does."""
    if type(module).__name__ != "Linear8bitLt":
        return 0.0
    return float(getattr(getattr(module, "state", None), "threshold", 0.0))


def _int8(module: Any, weight: Any) -> Described:
    """LLM.int8(): codes [outputs, inputs], and the magnitude that 127 stands for in each row."""
    holder = weight if weight.CB is not None else module.state  # the first forward moves them there
    codes, most = holder.CB, holder.SCB
    how: str | Layout = "int8_vectorwise", lambda: (codes, most.view(-1, 1))
    if module.state.has_fp16_weights:
        how = "has weights that are quantised at every forward"
    elif codes is None or most is None:
        how = "is not quantised yet"
    elif (threshold := threshold_of(module)) > 0:
        how = f"takes columns with a value beyond {threshold:g} out of the product of all rows"
    elif module.training:
        how = "is in training mode, in which bitsandbytes multiplies floats"
    elif codes.shape[1] > MOST_CODES:
        how = f"has rows of {codes.shape[1]} weights, whose sums do not fit into 32 bits"
    tensors = tuple(tensor for tensor in (codes, most) if tensor is not None) or (weight,)
    return "int8 of bitsandbytes", tensors, torch.float32, how


def in_rows(rewritten: Tensor, inputs: int) -> Tensor:
    """Rows of bytes, [outputs, inputs / 2], from what the first forward made of them.

    That has 32 outputs together. Of two inputs they are 32 bytes: output o's are bytes 2 o and 2 o + 1, in whose low
    half the codes are, and in whose high half those of output o + 16.
    """
    codes = halves.split(rewritten.view(-1, inputs // 2, ROWS // 2, 2, 1))  # [outputs / 32, inputs / 2, 16, 2, 2]
    return halves.join(codes.permute(0, 4, 2, 1, 3).reshape(-1, inputs), high_first=True)
