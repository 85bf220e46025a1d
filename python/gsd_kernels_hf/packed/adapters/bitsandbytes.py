"""bitsandbytes: linear layers of its own over nf4, fp4 or int8. Read from bitsandbytes 0.50.

Of four bits a byte has two codes, the first weight's in its high half; a block of 64 or so weights has a scale, which
may be quantised itself. On a CPU with AVX512_BF16 the first forward in evaluation mode rewrites both in place, see
:func:`in_rows`, and rounds the scales to bfloat16: the model is another one from there on, which the matrix follows.

int8 is LLM.int8() (arXiv 2208.07339): rows are rounded to codes too, and integers are multiplied. Above a threshold of
0 whole columns of activations are left out of that and multiplied as floats, wherever one row of a forward has a value
beyond the threshold. A row's result then depends on the rows beside it, so there is no product of a row to be read.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from gsd_kernels.ops.packed import BY_NAME, PackedMatrix, halves
from gsd_kernels.ops.packed.matrix import MOST_CODES

from .base import LibraryWeights, scales_of_rows, unread

ROWS = 32  # that are rewritten together


def stored(module: nn.Module) -> LibraryWeights | None:
    """Weights of a linear layer of bitsandbytes, or ``None``."""
    if "bitsandbytes" not in sys.modules or not isinstance(module, nn.Linear):
        return None
    weight: Any = module._parameters.get("weight")
    name = f"{type(weight).__name__} of bitsandbytes"
    if not type(weight).__module__.startswith("bitsandbytes."):
        return None
    if type(module).__name__ == "Linear8bitLt":
        return _int8(module, weight)
    if type(weight).__name__ != "Params4bit":
        return unread(name, f"is a {type(module).__name__} of bitsandbytes", weight)
    state = weight.quant_state or getattr(module, "quant_state", None)
    if state is None:
        return unread(name, "is not quantised yet", weight)
    rewritten = bool(getattr(state, "packing_format_for_cpu", False))
    nested = [state.absmax, state.state2.absmax, state.offset] if state.nested else [state.absmax]
    tensors = (weight, *nested)
    if len(state.shape) != 2 or state.shape[1] % state.blocksize:
        # Whose dequantisation goes by rows on one processor and by weights on another.
        problem = f"is {list(state.shape)} in blocks of {state.blocksize} that do not end with its rows"
        return unread(name, problem, *tensors)
    (outputs, inputs), groups = state.shape, state.shape[1] // state.blocksize

    def read() -> PackedMatrix:
        if rewritten:
            data = in_rows(weight.data, inputs)
            scales = state.absmax.T.float().contiguous()  # [groups, outputs] before
        else:
            data = weight.data.view(torch.uint8).view(outputs, inputs // 2)
            scales = scales_of(state).view(outputs, groups)
        return PackedMatrix(BY_NAME[state.quant_type], data, inputs, scales)

    return LibraryWeights(f"{state.quant_type} of bitsandbytes", tensors, torch.Size(state.shape), state.dtype, read)


def threshold_of(module: Any) -> float:
    """Beyond which a value takes its column out of the integer product of all rows of a forward; 0: none does."""
    if "bitsandbytes" not in sys.modules or type(module).__name__ != "Linear8bitLt":
        return 0.0
    return float(getattr(getattr(module, "state", None), "threshold", 0.0))


def _int8(module: Any, weight: Any) -> LibraryWeights:
    """LLM.int8(): codes [outputs, inputs], and the magnitude that 127 stands for in each row."""
    holder = weight if weight.CB is not None else module.state  # the first forward moves them there
    codes, most = holder.CB, holder.SCB
    tensors = tuple(t for t in (weight, codes, most) if t is not None)
    name = "int8 of bitsandbytes"
    if module.state.has_fp16_weights:
        return unread(name, "has weights that are quantised at every forward", *tensors)
    if codes is None or most is None:
        return unread(name, "is not quantised yet", *tensors)
    if (threshold := threshold_of(module)) > 0:
        problem = f"takes columns with a value beyond {threshold:g} out of the product of all rows"
        return unread(name, problem, *tensors)
    if module.training:
        return unread(name, "is in training mode, in which bitsandbytes multiplies floats", *tensors)
    if codes.shape[1] > MOST_CODES:
        return unread(name, f"has rows of {codes.shape[1]} weights, whose sums do not fit into 32 bits", *tensors)

    def read() -> PackedMatrix:
        data = codes.detach().contiguous()
        return PackedMatrix(BY_NAME["int8_vectorwise"], data, codes.shape[1], scales_of_rows(most, codes.shape[0]))

    return LibraryWeights(name, (codes, most), codes.shape, torch.float32, read, rounds_rows=True, any_dtype=True)


def scales_of(state: Any) -> Tensor:
    """float32, in the order of the weights."""
    from bitsandbytes.functional import dequantize_blockwise

    scales = dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
    return scales.float().contiguous()


def in_rows(rewritten: Tensor, inputs: int) -> Tensor:
    """Rows of bytes, [outputs, inputs / 2], from what the first forward made of them.

    That has 32 outputs together. Of two inputs they are 32 bytes: output o's are bytes 2 o and 2 o + 1, in whose low
    half the codes are, and in whose high half those of output o + 16.
    """
    codes = halves.split(rewritten.view(-1, inputs // 2, ROWS // 2, 2, 1))  # [outputs / 32, inputs / 2, 16, 2, 2]
    return halves.join(codes.permute(0, 4, 2, 1, 3).reshape(-1, inputs), high_first=True)
