from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..table import Op
from . import cpu, cuda, reference
from .dense import DenseMask
from .records import AttentionCall


def empty(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    """Results without content: the output's memory is [B, R, Hq, Dv]."""
    batch, heads, rows, _ = q.shape
    out = q.new_empty(batch, rows, heads, v.shape[3]).transpose(1, 2)
    return out, q.new_empty(batch, heads, rows, dtype=torch.float32)


ATTENTION = Op(
    "dag_attention",
    "q:float[B,H,R,D] k:q[B,G,S,D] v:q[B,G,S,V] ancestor_mask[B,R,W] kv_len[B] kv_start?[B] "
    "row_depths?[B,R] node_depths?[B,N] scale:float=s softcap?:float=p sliding_window?:int=w chunk?:int=c "
    "sinks?:float[H] -> q[B,H,R,V] float32[B,H,R]",
    reference.dag_attention,
    ranked=("cpu", "triton"),
    on_request=("cuda",),  # until measurements say where it wins
    own={"cpu": cpu.dag_attention, "cuda": cuda.dag_attention},
    flat=lambda call: call,
    fake=empty,
    dense=False,
    tolerance=1e-4,  # of float32
)
DENSE = (cpu.dag_attention, reference.dag_attention)  # these work on a dense mask


def dag_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ancestor_mask: Tensor,
    kv_len: Tensor,
    *,
    kv_start: Tensor | None = None,
    row_depths: Tensor | None = None,
    node_depths: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    dense: DenseMask | None = None,
    row_invariant: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in which a row sees the committed prefix and the graph nodes that its mask names.

    Cache positions ``kv_start … kv_len − 1`` are the prefix, position ``kv_len + j`` holds graph node j. Masked and
    free positions may hold anything, NaN included. A row's output is bitwise independent of what other rows see.

    Args:
        q: float [B, Hq, R, D].
        k, v: whole caches [B, Hkv, S, D] (v may have its own last size), any strides with unit last dimension; Hq is
            a multiple of Hkv and head h reads cache head ``h // (Hq / Hkv)``.
        ancestor_mask: int32 [B, R, ceil(N/32)], bit j: the row sees node j. A row sees itself only by its own bit. Bits
            of nodes that a graph does not have are 0.
        kv_len: int32 [B]. The caller keeps ``kv_len + N ≤ S``.
        kv_start: int32 [B], left padding to skip (default 0).
        row_depths, node_depths: int32 [B, R] and [B, ≥N]: position minus ``kv_len``; windows and chunks go by position.
        scale: default 1/sqrt(D).
        softcap: scores become ``softcap · tanh(score / softcap)``.
        sliding_window: a row sees positions p with ``row position − p < sliding_window``.
        chunk: a row sees positions of its own chunk only, those from ``p − (p − kv_start) mod chunk`` on, p being its
            position; not together with ``sliding_window``.
        sinks: float [Hq], a score of each query head that takes part in the softmax and has no value: the output is
            multiplied by sigmoid(lse − sink), once, after all splits are merged. Neither scaled nor soft-capped.
        return_lse: also return the log-sum-exp (natural logarithm) of the visible scores, the sink not among them.
        dense: what :func:`dense_mask` returns for the other arguments, for callers that attend many layers with one
            mask. They also see to it that caches hold finite values only and that no row is empty, which is then not
            checked. Only the PyTorch paths on a CPU and the reference use it.
        row_invariant: on a CPU a row has the same bits alone and among any number of others, and wherever the prefix
            ends where its nodes have depths 0, 1, …; not of float64.
        backend: see :mod:`gsd_kernels.backends`. "cuda" takes float16 and bfloat16 with head sizes 64 and 128, and has
            to be named: "auto" does not choose it.

    Returns:
        [B, Hq, R, Dv] in q's dtype, and with ``return_lse`` float32 [B, Hq, R]. A row that sees nothing gets 0 and
        −inf.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range.
    """
    lengths, limits = (kv_len, kv_start, row_depths, node_depths), (softcap, sliding_window, chunk)
    ATTENTION.line.check(q, k, v, ancestor_mask, *lengths, scale, *limits, sinks)
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"q: {q.shape[1]} heads are not a multiple of the cache's {k.shape[1]}")
    _check_sight(row_depths is not None and node_depths is not None, sliding_window, chunk)
    if backend == "auto" and q.dtype == torch.float64 and q.device.type != "cpu":
        backend = "reference"  # the GPU's kernels compute in float32
    function = ATTENTION.chosen(backend, q.device)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    more: dict[str, Any] = {"dense": dense, "return_lse": return_lse} if function in DENSE else {}
    more |= {"row_invariant": row_invariant} if function is cpu.dag_attention else {}
    call = AttentionCall(q, k, v, ancestor_mask, *lengths, scale, *limits, sinks)
    out, lse = function(call, **more)
    return (out, lse) if return_lse else out


def _check_sight(depths: bool, sliding_window: int | None, chunk: int | None) -> None:
    """Raise unless what limits the rows' sight is what the docstring of :func:`dag_attention` says."""
    if sliding_window is not None and chunk is not None:
        raise ValueError(f"chunk: expected None beside a sliding window of {sliding_window}, got {chunk}; give one")
    for name, size in (("sliding_window", sliding_window), ("chunk", chunk)):
        if size is None:
            continue
        if not depths:
            raise ValueError(f"{name}: needs row_depths and node_depths, since it goes by position")
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")
