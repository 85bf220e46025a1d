from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AttentionCall(NamedTuple):
    """The arguments of every implementation, in the order of the operator's schema; see :func:`dag_attention`."""

    q: Tensor  # [B, Hq, R, D]
    k: Tensor  # [B, Hkv, S, D]
    v: Tensor  # [B, Hkv, S, Dv]
    ancestor_mask: Tensor  # int32 [B, R, words]
    kv_len: Tensor  # int32 [B]
    kv_start: Tensor | None
    row_depths: Tensor | None
    node_depths: Tensor | None
    scale: float
    softcap: float | None
    sliding_window: int | None
    chunk: int | None = None
    sinks: Tensor | None = None  # [Hq]
