from __future__ import annotations

from torch import Tensor

from ...backends import resolve
from ...checks import check_tensor
from ..decoder_rows.api import FLOATS, check_rows
from . import compiled, reference
from .weights import FeatureWeights

IMPLEMENTATIONS = {"cpu": compiled.feature_rows, "reference": reference.feature_rows}


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
    *,
    keep: int,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward rows of a token graph through an EAGLE-3 drafter (arXiv 2503.01840) in one call.

    As :func:`~gsd_kernels.ops.decoder_rows.decoder_rows`, with the same arithmetic and caches, but for the first layer:
    its queries, keys and values read the normed embedding beside the normed feature, and the residual begins as the
    feature. A row's bits depend on its token, feature, position and what it sees alone.

    Args:
        weights: of the drafter.
        token_ids: int32 [B, R], inside the vocabulary of the embedding: of the token after each position.
        features: [B, R, hidden] in float32, bfloat16 or float16.
        positions, slots, ancestor_mask, node_depths, kv_len, kv_start, k_caches, v_caches: as of ``decoder_rows``.
        keep: logits of the last so many rows, 0 … R; with 0 keys and values are stored alone.
        backend: see :mod:`gsd_kernels.backends`.

    Returns:
        Of the last ``keep`` rows, float32: logits [B, keep, V], what the output matrix read, and what the norm before
        it read, [B, keep, hidden] each.

    Raises:
        TypeError, ValueError, RuntimeError: an argument has the wrong type, shape or range.
    """
    graph = positions, slots, ancestor_mask, node_depths, kv_len, kv_start
    check_rows(weights.decoder, token_ids, *graph, k_caches, v_caches, keep)
    device = token_ids.device
    check_tensor("features", features, (*token_ids.shape, len(weights.feature_norm)), FLOATS, device)
    return resolve(backend, device, IMPLEMENTATIONS)(weights, token_ids, features, *graph, k_caches, v_caches, keep)
