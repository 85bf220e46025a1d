from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..decoder_rows.compiled import behind_layers, layers
from .weights import FeatureWeights


def feature_rows(weights: FeatureWeights, *rows: Any) -> tuple[Tensor, Tensor, Tensor]:
    """csrc/cpu/decoder_rows.cpp; arguments as the reference takes them."""
    *graph, k_caches, v_caches, keep = rows
    return torch.ops.gsd_kernels.feature_rows(
        *(t.contiguous() for t in graph),
        *layers(weights.decoder),
        weights.feature_norm,
        weights.normed_residual,
        *behind_layers(weights.decoder, k_caches, v_caches),
        keep,
    )
