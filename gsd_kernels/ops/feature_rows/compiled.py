from __future__ import annotations

import torch
from torch import Tensor

from ..decoder_rows.weights import stored
from .weights import FeatureWeights


def feature_rows(
    weights: FeatureWeights,
    token_ids: Tensor,
    features: Tensor,
    positions: Tensor,
    slots: Tensor,
    ancestor_mask: Tensor,
    node_depths: Tensor,
    kv_len: Tensor,
    kv_start: Tensor,
    k_caches: list[Tensor],
    v_caches: list[Tensor],
    keep: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """csrc/cpu/decoder_rows.cpp"""
    w = weights.decoder
    return torch.ops.gsd_kernels.feature_rows(
        token_ids.contiguous(),
        features.contiguous(),
        positions.contiguous(),
        slots.contiguous(),
        ancestor_mask.contiguous(),
        node_depths.contiguous(),
        kv_len.contiguous(),
        kv_start.contiguous(),
        stored(w.embedding),
        w.flat_layers,
        *w.packing,
        weights.feature_norm,
        weights.normed_residual,
        w.final_norm,
        stored(w.head),
        w.inv_freq,
        k_caches,
        v_caches,
        w.windows,
        w.heads,
        w.eps,
        w.rope_scale,
        keep,
    )
