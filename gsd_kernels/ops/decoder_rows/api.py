from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from ...backends import resolve
from ...checks import check_tensor
from . import compiled, reference

IMPLEMENTATIONS = {"cpu": compiled.decoder_rows, "reference": reference.decoder_rows}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LayerWeights:
    """One layer's parameters as they lie in the model; D is the head size."""

    input_norm: Tensor  # [hidden]
    q: Tensor  # [heads · D, hidden]
    k: Tensor  # [kv_heads · D, hidden]
    v: Tensor
    o: Tensor  # [hidden, heads · D]
    second_norm: Tensor  # [hidden]
    gate: Tensor  # [inner, hidden]
    up: Tensor
    down: Tensor  # [hidden, inner]
    q_bias: Tensor | None = None  # [outputs], as the others
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [D], of every head before it is turned
    k_norm: Tensor | None = None
    window: int = 0  # positions that a row sees, itself among them; 0: all

    @property
    def tensors(self) -> list[Tensor]:
        """All of them in order, empty ones for those that there are not."""
        values = [getattr(self, field.name) for field in fields(self) if field.name != "window"]
        return [self.q.new_empty(0) if value is None else value for value in values]


@dataclass(frozen=True)
class DecoderWeights:
    """The parameters of a LLaMA-like decoder, as they lie in the model; nothing is copied."""

    embedding: Tensor  # [V, hidden]
    layers: list[LayerWeights]
    final_norm: Tensor  # [hidden]
    head: Tensor  # [V, hidden]
    inv_freq: Tensor  # float32 [D/2], of the rotary embedding
    rope_scale: float  # of its cosines and sines
    heads: int  # query heads
    eps: float  # of the norms

    @cached_property
    def flat_layers(self) -> list[Tensor]:
        return [t for layer in self.layers for t in layer.tensors]

    @cached_property
    def windows(self) -> list[int]:
        return [layer.window for layer in self.layers]


def decoder_rows(
    weights: DecoderWeights,
    token_ids: Tensor,
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
) -> tuple[Tensor, Tensor]:
    """Forward rows of a token graph through all layers of a decoder in one call.

    LLaMA's layers (RMSNorm, rotary embedding, grouped attention, SwiGLU; arXiv 2302.13971) with what Mistral, Qwen2
    and Qwen3 add: a sliding window, biases, norms of queries and keys. The caches get the rows' keys and values.

    Sums and the hidden state are float32; what is multiplied with bfloat16 weights or keys is rounded to bfloat16
    first. The CPU operator is row-invariant: the bits of a row depend on its token, its position and what it sees, not
    on other rows and sequences, where its ancestors lie, what of them is committed, padding, or threads. (Another
    instruction set may round differently, see :mod:`gsd_kernels.cpu_levels`.)

    Args:
        weights: matrices of one dtype, float32, bfloat16 or float16.
        token_ids: int32 [B, R], inside the vocabulary.
        positions: int32 [B, R], text positions.
        slots: int32 [B, R], cache positions to store keys and values at.
        ancestor_mask: int32 [B, R, words], as in :func:`~gsd_kernels.dag_attention`.
        node_depths: int32 [B, N], text positions of the slots behind the prefix minus that of the first of them.
        kv_len, kv_start: int32 [B], the prefix.
        k_caches, v_caches: a layer each, [B, Hkv, S, D].
        keep: logits of the last so many rows, 0 … R.
        backend: see :mod:`gsd_kernels.backends`.

    Returns:
        Logits, float32 [B, keep, V], and what the output matrix read, float32 [B, keep, hidden].

    Raises:
        TypeError, ValueError, RuntimeError: an argument has the wrong type, shape or range.
    """
    int32, device, (batch, rows) = (torch.int32,), token_ids.device, token_ids.shape
    check_tensor("token_ids", token_ids, (None, None), int32, device)
    check_tensor("positions", positions, (batch, rows), int32, device)
    check_tensor("slots", slots, (batch, rows), int32, device)
    check_tensor("ancestor_mask", ancestor_mask, (batch, rows, None), int32, device)
    check_tensor("node_depths", node_depths, (batch, None), int32, device)
    check_tensor("kv_len", kv_len, (batch,), int32, device)
    check_tensor("kv_start", kv_start, (batch,), int32, device)
    if len(k_caches) != len(weights.layers) or len(v_caches) != len(weights.layers):
        raise ValueError(f"k_caches: expected {len(weights.layers)} layers, got {len(k_caches)} and {len(v_caches)}")
    if not 0 <= keep <= rows:
        raise ValueError(f"keep: expected 0 … {rows}, the number of rows, got {keep}")
    return resolve(backend, device, IMPLEMENTATIONS)(
        weights,
        token_ids,
        positions,
        slots,
        ancestor_mask,
        node_depths,
        kv_len,
        kv_start,
        k_caches,
        v_caches,
        keep,
    )
