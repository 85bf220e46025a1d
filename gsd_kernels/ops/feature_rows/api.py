from __future__ import annotations

from typing import Any

from ..decoder_rows.api import BEHIND, PLACES, WEIGHTS
from ..table import Op
from . import cuda, reference
from .weights import FeatureWeights


def flat(weights: FeatureWeights, *rows: Any) -> tuple[Any, ...]:
    """The operator's arguments."""
    *graph, k_caches, v_caches, keep = rows
    first = (*weights.decoder.before_layers(), *weights.first)
    return (*graph, *first, *weights.decoder.behind_layers(k_caches, v_caches), keep)


feature_rows = Op(
    "feature_rows",
    f"token_ids[B,R] features:float[B,R,H] {PLACES} {WEIGHTS} feature_norm:float[...] "
    f"normed_residual:bool=n projection{{ ... }} feature_first:bool=f {BEHIND} keep:int=k "
    "-> float32[...] float32[...] float32[...]",
    reference.feature_rows,
    ranked=("cpu",),
    static=False,
    on_request=("cuda",),  # reads nothing back, and so checks no token ids
    own={"cuda": cuda.feature_rows},
    flat=flat,
)
