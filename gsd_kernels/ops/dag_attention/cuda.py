"""The CUDA C++ attention: ``csrc/algorithms/attention.h`` on tensor cores."""

from __future__ import annotations

from torch import Tensor

from ..cuda_common import check_device, check_rows, check_type, expects
from ..table import OPS
from .records import AttentionCall


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
    check_device(q.device)
    check_type("q", q.dtype, q.shape[3])
    if v.shape[3] != q.shape[3]:
        raise ValueError(expects("v", f"q's heads of {q.shape[3]}, got {v.shape[3]}"))
    for name, rows in (("q", q), ("k", k), ("v", v)):
        check_rows(name, rows, q.dtype)
