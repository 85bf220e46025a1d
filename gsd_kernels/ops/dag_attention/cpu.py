"""The CPU path: csrc/cpu/attention.cpp for few rows, PyTorch's fused attention for more.

The former computes a row in the order of the text: its bits depend neither on other rows nor on where the prefix ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..table import OPS
from . import sdpa
from .dense import DenseMask
from .records import AttentionCall

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEW_ROWS = 8
"""Query vectors of one cache head up to which the compiled op is faster: beyond, PyTorch's blocked products win."""


def dag_attention(
    call: AttentionCall, *, dense: DenseMask | None = None, return_lse: bool = False, row_invariant: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The output's memory is [B, R, Hq, Dv]."""
    q, k, v, *lengths, scale, softcap, sliding_window, chunk, sinks = call
    packed = q.shape[1] // k.shape[1] * q.shape[2]
    if (packed > FEW_ROWS and not row_invariant) or q.dtype not in DTYPES:
        return sdpa.dag_attention(call, dense=dense, return_lse=return_lse)
    tensors = (t if t is None or t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    lengths = [t if t is None else t.contiguous() for t in lengths]
    sinks = None if sinks is None else sinks.float().contiguous()
    return OPS["dag_attention"].operator(*tensors, *lengths, scale, softcap, sliding_window, chunk, sinks)
