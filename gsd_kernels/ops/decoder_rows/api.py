from __future__ import annotations

from typing import Any

from ..table import Op
from . import cuda, reference
from .weights import DecoderWeights


def flat(weights: DecoderWeights, *rows: Any) -> tuple[Any, ...]:
    """The operator's arguments."""
    *graph, k_caches, v_caches, keep, states, spoiled = rows
    rest = weights.behind_layers(k_caches, v_caches)
    return (*graph, *weights.before_layers(), *rest, list(states), keep, spoiled)


decoder_rows = Op(
    "decoder_rows(Tensor token_ids, Tensor positions, Tensor slots, Tensor ancestor_mask, Tensor node_depths, "
    "Tensor kv_len, Tensor kv_start, Tensor embedding, Tensor[] layers, int[] kinds, Tensor[] scales, "
    "Tensor final_norm, Tensor head, Tensor inv_freq, Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, int[] windows, "
    "int heads, float eps, float rope_scale, int[] states, int keep, Tensor(c!)? spoiled=None) "
    "-> (Tensor, Tensor, Tensor)",
    reference.decoder_rows,
    ranked=("cpu",),
    on_request=("cuda",),  # reads nothing back, and so checks no token ids
    own={"cuda": cuda.decoder_rows},
    flat=flat,
)
