from __future__ import annotations

from typing import Any

from ..table import Op
from . import cuda, reference
from .weights import FeatureWeights


def flat(weights: FeatureWeights, *rows: Any) -> tuple[Any, ...]:
    """The operator's arguments."""
    *graph, k_caches, v_caches, keep = rows
    first = (*weights.decoder.before_layers(), *weights.first)
    return (*graph, *first, *weights.decoder.behind_layers(k_caches, v_caches), keep)


feature_rows = Op(
    "feature_rows(Tensor token_ids, Tensor features, Tensor positions, Tensor slots, Tensor ancestor_mask, "
    "Tensor node_depths, Tensor kv_len, Tensor kv_start, Tensor embedding, Tensor[] layers, int[] kinds, "
    "Tensor[] scales, Tensor feature_norm, bool normed_residual, Tensor[] projection, bool feature_first, "
    "Tensor final_norm, Tensor head, Tensor inv_freq, Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, int[] windows, "
    "int heads, float eps, float rope_scale, int keep) -> (Tensor, Tensor, Tensor)",
    reference.feature_rows,
    ranked=("cpu",),
    on_request=("cuda",),  # reads nothing back, and so checks no token ids
    own={"cuda": cuda.feature_rows},
    flat=flat,
)
