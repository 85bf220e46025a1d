"""The Triton attention as an opaque operator. Importing this imports no triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...compiled import empty_attention, schema_of
from ..launching import launching_op
from .records import AttentionCall

HALF_OR_SINGLE = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


@launching_op("gsd_kernels::triton_dag_attention", mutates_args=(), schema=schema_of("dag_attention"))
def _dag_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    from .triton import dag_attention as launch

    return launch(*arguments)


_dag_attention.register_fake(empty_attention)


def dag_attention(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Tensor-core attention with float32 accumulation. The output's memory is [B, R, Hq, Dv]."""
    if call.q.dtype not in HALF_OR_SINGLE:
        raise TypeError("q: backend 'triton' takes float32, float16 or bfloat16; use backend='reference' for float64")
    if max(call.q.shape[3], call.v.shape[3]) > MAX_HEAD_DIM:
        raise ValueError(f"q: backend 'triton' takes head sizes up to {MAX_HEAD_DIM}")
    return _dag_attention(*call)
