from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .weights import DecoderWeights, stored


def decoder_rows(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """csrc/cpu/decoder_rows.cpp, or csrc/cuda/decoder_rows.cpp on a GPU; arguments as of :func:`flat`."""
    return torch.ops.gsd_kernels.decoder_rows(*flat(*arguments))


def flat(weights: DecoderWeights, *rows: Any) -> tuple[Any, ...]:
    """The operator's arguments, of those that the reference takes."""
    *graph, k_caches, v_caches, states, keep = rows
    rest = behind_layers(weights, k_caches, v_caches)
    return (*(t.contiguous() for t in graph), *layers(weights), *rest, list(states), keep)


def layers(w: DecoderWeights) -> tuple[Any, ...]:
    """Of an operator's arguments the embedding, the layers, and how they are packed."""
    return stored(w.embedding), w.flat_layers, *w.packing


def behind_layers(w: DecoderWeights, k_caches: list[Tensor], v_caches: list[Tensor]) -> tuple[Any, ...]:
    """Those from the norm behind the layers on, up to what only one operator has."""
    output = w.final_norm, stored(w.head), w.inv_freq
    return *output, k_caches, v_caches, w.windows, w.heads, w.eps, w.rope_scale
