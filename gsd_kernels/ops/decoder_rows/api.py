from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...backends import resolve
from ...checks import check_tensor
from . import compiled, reference

IMPLEMENTATIONS = {"cpu": compiled.decoder_rows, "reference": reference.decoder_rows}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LANES = 16
"""Hidden, inner and head sizes are multiples of this."""


@dataclass(frozen=True)
class DecoderWeights:
    """The parameters of a LLaMA decoder without biases, as they lie in the model; nothing is copied."""

    embedding: Tensor  # [V, hidden]
    layers: list[tuple[Tensor, ...]]  # input norm, q, k, v, o, second norm, gate, up, down
    final_norm: Tensor  # [hidden]
    head: Tensor  # [V, hidden]
    inv_freq: Tensor  # float32 [D/2], of the rotary embedding
    rope_scale: float  # of its cosines and sines
    heads: int  # query heads
    eps: float  # of the norms

    @cached_property
    def flat_layers(self) -> list[Tensor]:
        return [t for layer in self.layers for t in layer]


def decoder_rows(
    weights: DecoderWeights,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    ancestor_mask: Tensor,
    kv_len: Tensor,
    kv_start: Tensor,
    k_caches: list[Tensor],
    v_caches: list[Tensor],
    *,
    keep: int,
    backend: str = "auto",
) -> Tensor:
    """Forward graph rows through a small decoder in one call, activations in float32.

    For drafts whose forward is mostly the cost of calling operators: LLaMA's layers (RMSNorm, rotary embedding, grouped
    attention, SwiGLU; arXiv 2302.13971) over the rows, their keys and values stored in the caches.

    Args:
        weights: float32, bfloat16 or float16 parameters.
        token_ids: int32 [B, R], inside the vocabulary.
        positions: int32 [B, R], text positions.
        slots: int32 [B, R], cache positions to store keys and values at.
        ancestor_mask: int32 [B, R, words], as in :func:`~gsd_kernels.dag_attention`.
        kv_len, kv_start: int32 [B], the prefix.
        k_caches, v_caches: a layer each, [B, Hkv, S, D].
        keep: logits of the last so many rows.
        backend: see :mod:`gsd_kernels.backends`.

    Returns:
        float32 [B, keep, V].

    Raises:
        TypeError, ValueError, RuntimeError: an argument has the wrong type, shape or range.
    """
    int32, device, (batch, rows) = (torch.int32,), token_ids.device, token_ids.shape
    check_tensor("token_ids", token_ids, (None, None), int32, device)
    check_tensor("positions", positions, (batch, rows), int32, device)
    check_tensor("slots", slots, (batch, rows), int32, device)
    check_tensor("ancestor_mask", ancestor_mask, (batch, rows, None), int32, device)
    check_tensor("kv_len", kv_len, (batch,), int32, device)
    check_tensor("kv_start", kv_start, (batch,), int32, device)
    if len(k_caches) != len(weights.layers) or len(v_caches) != len(weights.layers):
        raise ValueError(f"k_caches: expected {len(weights.layers)} layers, got {len(k_caches)} and {len(v_caches)}")
    return resolve(backend, device, IMPLEMENTATIONS)(
        weights, token_ids, positions, slots, ancestor_mask, kv_len, kv_start, k_caches, v_caches, keep
    )
