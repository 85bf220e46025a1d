from __future__ import annotations

import torch
from torch import Tensor

from ..decoder_rows.reference import Arithmetic
from .weights import FeatureWeights


def feature_rows(
    weights: FeatureWeights,
    token_ids: Tensor,  # int32 [B, R]
    features: Tensor,  # [B, R, hidden]
    positions: Tensor,  # int32 [B, R]
    slots: Tensor,  # int32 [B, R]
    ancestor_mask: Tensor,  # int32 [B, R, words]
    node_depths: Tensor,  # int32 [B, N]
    kv_len: Tensor,  # int32 [B]
    kv_start: Tensor,  # int32 [B]
    k_caches: list[Tensor],
    v_caches: list[Tensor],
    keep: int,
) -> tuple[Tensor, Tensor, Tensor]:
    w, arithmetic = weights.decoder, Arithmetic(weights.decoder)
    x = features.float()
    normed = arithmetic.norm(x, weights.feature_norm)
    both = torch.cat([arithmetic.norm(arithmetic.embedded(token_ids), w.layers[0].input_norm), normed], -1)
    graph = positions, slots, ancestor_mask, node_depths, kv_len, kv_start
    x = arithmetic.layers(normed if weights.normed_residual else x, both, *graph, k_caches, v_caches)[-1]
    state = x[:, x.shape[1] - keep :]
    hidden = arithmetic.norm(state, w.final_norm)
    return arithmetic.project(hidden, arithmetic.weights.head), hidden, state
