"""The CPU path: csrc/cpu/attention.cpp for few rows, PyTorch's fused attention for more.

The former computes a row in the order of the text: its bits depend neither on other rows nor on where the prefix ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import sdpa
from .dense import DenseMask

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEW_ROWS = 8
"""Query vectors of one cache head up to which the compiled op is faster: beyond, PyTorch's blocked products win."""


def dag_attention(
    q: Tensor,  # [B, Hq, R, D]
    k: Tensor,  # [B, Hkv, S, D]
    v: Tensor,  # [B, Hkv, S, Dv]
    ancestor_mask: Tensor,  # int32 [B, R, words]
    kv_len: Tensor,  # int32 [B]
    kv_start: Tensor | None,
    row_depths: Tensor | None,
    node_depths: Tensor | None,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
    *,
    dense: DenseMask | None = None,
    return_lse: bool = False,
    row_invariant: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The output's memory is [B, R, Hq, Dv]."""
    arguments = (q, k, v, ancestor_mask, kv_len, kv_start, row_depths, node_depths)
    packed = q.shape[1] // k.shape[1] * q.shape[2]
    if (packed > FEW_ROWS and not row_invariant) or q.dtype not in DTYPES:
        rest = (scale, softcap, sliding_window, chunk, sinks)
        return sdpa.dag_attention(*arguments, *rest, dense=dense, return_lse=return_lse)
    tensors = (t if t is None or t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    lengths = (t if t is None else t.contiguous() for t in arguments[3:])
    sinks = None if sinks is None else sinks.float().contiguous()
    return torch.ops.gsd_kernels.dag_attention(*tensors, *lengths, scale, softcap, sliding_window, chunk, sinks)
