from __future__ import annotations

from typing import Any

from ..table import Op
from . import cuda, reference
from .weights import DecoderWeights

# Of the lines of both operators of rows.
PLACES = "positions[B,R] slots[B,R] ancestor_mask[B,R,W] node_depths[B,N] kv_len[B] kv_start[B]"
WEIGHTS = "embedding:float[V,E] layers{ ... } kinds:ints scales{ ... }"
BEHIND = (
    "final_norm:float[H] head:float[O,I] inv_freq:float32[D] k_caches!{ ... } v_caches!{ ... } windows:ints "
    "heads:int=h eps:float=e rope_scale:float=s"
)


def flat(weights: DecoderWeights, *rows: Any) -> tuple[Any, ...]:
    """The operator's arguments."""
    *graph, k_caches, v_caches, keep, states, spoiled = rows
    rest = weights.behind_layers(k_caches, v_caches)
    return (*graph, *weights.before_layers(), *rest, list(states), keep, spoiled)


decoder_rows = Op(
    "decoder_rows",
    f"token_ids[B,R] {PLACES} {WEIGHTS} {BEHIND} states:ints keep:int=k spoiled?!:float32[B,R] "
    "-> float32[...] float32[...] float32[...]",
    reference.decoder_rows,
    ranked=("cpu",),
    static=False,
    on_request=("cuda",),  # reads nothing back, and so checks no token ids
    own={"cuda": cuda.decoder_rows},
    flat=flat,
)
