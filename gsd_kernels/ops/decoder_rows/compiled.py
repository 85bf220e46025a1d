from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .weights import DecoderWeights, stored


def decoder_rows(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """csrc/cpu/decoder_rows.cpp, or csrc/cuda/decoder_rows.cpp on a GPU; arguments as of :func:`flat`."""
    return torch.ops.gsd_kernels.decoder_rows(*flat(*arguments))


def flat(
    weights: DecoderWeights,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    ancestor_mask: Tensor,
    node_depths: Tensor,
    kv_len: Tensor,
    kv_start: Tensor,
    k_caches: list[Tensor],
    v_caches: list[Tensor],
    states: Sequence[int],
    keep: int,
) -> tuple[Any, ...]:
    """The operator's arguments."""
    w = weights
    return (
        token_ids.contiguous(),
        positions.contiguous(),
        slots.contiguous(),
        ancestor_mask.contiguous(),
        node_depths.contiguous(),
        kv_len.contiguous(),
        kv_start.contiguous(),
        stored(w.embedding),
        w.flat_layers,
        *w.packing,
        w.final_norm,
        stored(w.head),
        w.inv_freq,
        k_caches,
        v_caches,
        w.windows,
        w.heads,
        w.eps,
        w.rope_scale,
        list(states),
        keep,
    )
