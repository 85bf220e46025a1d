"""The CUDA C++ attention: ``csrc/algorithms/attention.h`` on tensor cores."""

from __future__ import annotations

import torch
from torch import Tensor

from ..table import OPS
from .records import AttentionCall

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128)
MIN_CAPABILITY = (8, 0)
ALIGNMENT = 16  # bytes of one asynchronous copy
OTHERWISE = "use backend='triton' or 'reference'"


def dag_attention(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Two launches of static shape. The output's memory is [B, R, Hq, D]."""
    check(call.q, call.k, call.v)
    mask, start, sinks = call.ancestor_mask, call.kv_start, call.sinks
    by_position = call.sliding_window is not None or call.chunk is not None
    depths = (t.contiguous() if by_position and t is not None else None for t in (call.row_depths, call.node_depths))
    return OPS["dag_attention"].operator(
        *(call.q, call.k, call.v, mask if mask.stride(-1) == 1 else mask.contiguous()),
        *(call.kv_len.contiguous(), None if start is None else start.contiguous(), *depths),
        *(call.scale, call.softcap, call.sliding_window, call.chunk),
        None if sinks is None else sinks.float().contiguous(),
    )


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise for what the kernels do not take, which the other backends do."""
    if q.dtype not in DTYPES:
        got = str(q.dtype).removeprefix("torch.")
        raise TypeError(f"q: backend 'cuda' expects float16 or bfloat16, got {got}; {OTHERWISE}")
    if q.shape[3] not in HEAD_DIMS or v.shape[3] != q.shape[3]:
        name, got = ("q", q.shape[3]) if q.shape[3] not in HEAD_DIMS else ("v", v.shape[3])
        expected = "64 or 128" if name == "q" else f"q's {q.shape[3]}"
        raise ValueError(f"{name}: backend 'cuda' expects head size {expected}, got {got}; {OTHERWISE}")
    if q.device.type == "cuda":
        capability = torch.cuda.get_device_capability(q.device)
        if capability < MIN_CAPABILITY:
            raise ValueError(
                f"q: backend 'cuda' expects a GPU of compute capability 8.0 or newer, got "
                f"{capability[0]}.{capability[1]}; use backend='reference'"
            )
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.stride(3) != 1:
            raise ValueError(
                f"{name}: backend 'cuda' expects stride 1 in the last dimension, got {t.stride(3)}; "
                f"pass {name}.contiguous()"
            )
        offsets = [t.storage_offset() * t.element_size()]  # allocations begin at multiples of 512 bytes
        offsets += [t.stride(d) * t.element_size() for d in range(3) if t.shape[d] > 1]
        if any(offset % ALIGNMENT for offset in offsets):
            raise ValueError(
                f"{name}: backend 'cuda' expects rows that begin at multiples of {ALIGNMENT} bytes, got an offset of "
                f"{offsets[0]} and strides of {offsets[1:]} bytes; pass {name}.clone(memory_format="
                "torch.contiguous_format)"
            )
