"""The CUDA C++ decoder for drafters that read features: one launch makes of a row's token and feature what is read.

Keys and values of features alone are a launch a layer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..cuda_common import check_device
from ..decoder_rows import cuda
from .weights import FeatureWeights


def feature_rows(weights: FeatureWeights, token_ids: Tensor, *rows: Any) -> tuple[Tensor, Tensor, Tensor]:
    """csrc/cuda/decoder_rows.cpp; arguments as the reference takes them."""
    features, *graph, k_caches, v_caches, keep = rows
    features = features.contiguous()
    check_device(token_ids.device)
    cuda.check_once(weights, check)
    cuda.check_tensors(weights.decoder.dtype, [("features", features)])
    with cuda.naming_caches(weights.decoder, k_caches, v_caches):
        return cuda.run("feature_rows", weights, token_ids, features, *graph, k_caches, v_caches, keep)


def check(weights: FeatureWeights) -> None:
    """Raise for weights that the kernels do not take.

    Raises:
        TypeError, ValueError: see :func:`gsd_kernels.ops.decoder_rows.cuda.check`.
    """
    cuda.check(weights.decoder)
    projection = weights.projection
    named = {"feature_norm": weights.feature_norm}
    if projection is not None:
        named |= {
            "projection": projection.matrix,
            "token_norm": projection.token_norm,
            "projection_bias": projection.bias,
        }
    cuda.check_tensors(weights.decoder.dtype, named.items())
