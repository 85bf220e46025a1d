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
    """Forward rows of a token graph through a drafter that reads features in one call.

    As :func:`~gsd_kernels.ops.decoder_rows.decoder_rows`, with the same arithmetic and caches, but for what the first
    layer reads: the normed embedding beside the normed feature. In EAGLE-3 (arXiv 2503.01840) its queries, keys and
    values read both, and the residual begins as the feature. In multi-token prediction (arXiv 2412.19437) a projection
    makes one vector of them, with which the layers begin. For a block drafter (arXiv 2602.06036) every layer stores
    keys and values of the features, which are read as they are, and nothing else is done. A row's bits depend on its
    token, feature, position and what it sees alone.

    Args:
        weights: of the drafter.
        token_ids: int32 [B, R], inside the vocabulary of the embedding: of the token after each position.
        features: [B, R, hidden] in float32, bfloat16 or float16; on a GPU in the weights' dtype.
        positions, slots, ancestor_mask, node_depths, kv_len, kv_start, k_caches, v_caches: as of ``decoder_rows``.
        keep: logits of the last so many rows, 0 … R; with 0 keys and values are stored alone. 0 without a norm.

    Returns:
        Of the last ``keep`` rows logits [B, keep, V], float32, and by the CUDA operator rounded to the weights' dtype;
        what the output matrix read, and what the norm before it read, float32 [B, keep, hidden] each.
    """
    w, arithmetic, projection = weights.decoder, Arithmetic(weights.decoder), weights.projection
    x = features.float()
    if weights.feature_norm is None:
        if keep or projection is not None:
            raise ValueError(f"feature_norm: without one expected no projection, and keep 0; got {keep}")
        turns = arithmetic.turns(positions)
        for layer, k_cache, v_cache in zip(arithmetic.weights.layers, k_caches, v_caches, strict=True):
            arithmetic.store(x, layer, turns, k_cache, v_cache, slots)
        nothing = x[:, :0]
        return arithmetic.project(nothing, arithmetic.weights.head), nothing, nothing
    feature = arithmetic.norm(x, weights.feature_norm)
    token = arithmetic.norm(arithmetic.embedded(token_ids), weights.token_norm)
    if projection is None:
        x, read = feature if weights.normed_residual else x, torch.cat([token, feature], -1)
    else:
        both = torch.cat([feature, token] if projection.feature_first else [token, feature], -1)
        x = arithmetic.project(both, projection.matrix, projection.bias)
        read = arithmetic.norm(x, w.layers[0].input_norm)
    graph = positions, slots, ancestor_mask, node_depths, kv_len, kv_start
    x = arithmetic.layers(x, read, *graph, k_caches, v_caches)[-1]
    state = x[:, x.shape[1] - keep :]
    hidden = arithmetic.norm(state, w.final_norm)
    return arithmetic.project(hidden, arithmetic.weights.head), hidden, state
