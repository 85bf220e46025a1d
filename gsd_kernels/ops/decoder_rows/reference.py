from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from ..dag_attention import reference as attention
from ..dag_attention.dense import visibility
from ..packed import PackedMatrix, codes
from ..write_kv.reference import write_kv
from .weights import DecoderWeights, LayerWeights


def decoder_rows(
    weights: DecoderWeights,
    token_ids: Tensor,  # int32 [B, R]
    positions: Tensor,  # int32 [B, R]
    slots: Tensor,  # int32 [B, R]
    ancestor_mask: Tensor,  # int32 [B, R, words]
    node_depths: Tensor,  # int32 [B, N]
    kv_len: Tensor,  # int32 [B]
    kv_start: Tensor,  # int32 [B]
    k_caches: list[Tensor],
    v_caches: list[Tensor],
    keep: int,
    states: Sequence[int] = (),
    spoiled: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward rows of a token graph through all layers of a decoder in one call.

    LLaMA's layers (RMSNorm, rotary embedding, grouped attention, SwiGLU; arXiv 2302.13971) with what Mistral, Qwen2
    and Qwen3 add: a sliding window, biases, norms of queries and keys. The caches get the rows' keys and values.

    Sums and the hidden state are float32; what is multiplied with bfloat16 weights or keys is rounded to bfloat16
    first (the CUDA operator rounds to float16 likewise). The compiled operators are row-invariant: the bits of a row
    depend on its token, its position and what it sees, not on other rows and sequences, where its ancestors lie, what
    of them is committed, padding, threads, or how it is launched. (Another instruction set may round differently, see
    :mod:`gsd_kernels.cpu_levels`.)

    The CUDA operator (``backend="cuda"``; ``"auto"`` never takes it) is for float16 and bfloat16, heads of 64 and 128,
    on compute capability 8.0 and newer, and for packed matrices of some kinds (``cuda.PACKED``). It reads nothing back,
    so that a CUDA graph can hold it: token ids are not checked against the vocabulary, nor slots against the cache.

    Args:
        weights: matrices of one dtype, float32, bfloat16 or float16, or packed, with the bits of those they stand for.
        token_ids: int32 [B, R], inside the vocabulary.
        positions: int32 [B, R], text positions.
        slots: int32 [B, R], cache positions to store keys and values at.
        ancestor_mask: int32 [B, R, words], as in :func:`~gsd_kernels.dag_attention`.
        node_depths: int32 [B, N], text positions of the slots behind the prefix minus that of the first of them.
        kv_len, kv_start: int32 [B], the prefix.
        k_caches, v_caches: a layer each, [B, Hkv, S, D].
        keep: logits of the last so many rows, 0 … R.
        states: numbers of layers, from 0, whose input is returned; the number of layers: what leaves the norm behind
            them, of every row.
        spoiled: float32 [B, R], gets NaN at rows with a key or value that is not finite, and stays as it is at others;
            see :func:`~gsd_kernels.write_kv`. The CUDA operator's logits of a row whose mark is NaN are NaN.

    Returns:
        Logits [B, keep, V], float32, and by the compiled operators rounded to the weights' dtype; what the output
        matrix read, float32 [B, keep, hidden]; and what the layers of ``states`` read, float32
        [len(states), B, R, hidden].
    """
    arithmetic = Arithmetic(weights)
    x = arithmetic.embedded(token_ids)
    graph = positions, slots, ancestor_mask, node_depths, kv_len, kv_start
    normed = arithmetic.norm(x, weights.layers[0].input_norm)
    read_by = arithmetic.layers(x, normed, *graph, k_caches, v_caches, spoiled)
    read_by[-1] = arithmetic.norm(read_by[-1], weights.final_norm)
    hidden = read_by[-1][:, x.shape[1] - keep :]
    return (
        arithmetic.project(hidden, arithmetic.weights.head),
        hidden,
        torch.stack([read_by[i] for i in states]) if states else x.new_empty(0, *x.shape),
    )


class Arithmetic:
    """The arithmetic of a decoder's layers, in float32."""

    def __init__(self, weights: DecoderWeights) -> None:
        self.weights = weights if not weights.packing[0] else weights.dense()

    def embedded(self, token_ids: Tensor) -> Tensor:
        """int32 [B, R] → [B, R, hidden]"""
        return embedding(token_ids, self.weights.embedding).float()

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight.float(), self.weights.eps)

    def project(self, x: Tensor, weight: Tensor | PackedMatrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, PackedMatrix):
            out = codes.linear(x, weight, self.weights.dtype)
            return out if bias is None else out + bias.float()
        return linear(rounded(x, weight), weight.float(), None if bias is None else bias.float())

    def split(self, x: Tensor) -> Tensor:
        """[B, R, H·D] → [B, H, R, D]"""
        return x.unflatten(-1, (-1, 2 * self.weights.inv_freq.shape[0])).transpose(1, 2)

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions int32 [B, R], [B, 1, R, D/2] each."""
        angles, scale = positions[..., None].float() * self.weights.inv_freq, self.weights.rope_scale  # [B, R, D/2]
        return (angles.cos() * scale)[:, None], (angles.sin() * scale)[:, None]

    def turned(self, x: Tensor, weight: Tensor | None, turns: tuple[Tensor, Tensor]) -> Tensor:
        """[B, R, H·D] → heads [B, H, R, D], normed where there is a weight."""
        (cos, sin), heads = turns, self.split(x)
        a, b = (heads if weight is None else self.norm(heads, weight)).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def store(
        self,
        x: Tensor,  # [B, R, inputs]
        layer: LayerWeights,
        turns: tuple[Tensor, Tensor],
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        spoiled: Tensor | None = None,
    ) -> None:
        """Write a layer's keys and values of rows."""
        key = self.turned(self.project(x, layer.k, layer.k_bias), layer.k_norm, turns)
        value = self.split(self.project(x, layer.v, layer.v_bias))
        write_kv(k_cache, v_cache, key.to(k_cache.dtype), value.to(v_cache.dtype), slots.long(), spoiled)

    def layers(
        self,
        x: Tensor,  # [B, R, hidden], where the residual begins
        normed: Tensor,  # [B, R, inputs], what queries, keys and values of the first layer read
        positions: Tensor,
        slots: Tensor,
        ancestor_mask: Tensor,
        node_depths: Tensor,
        kv_len: Tensor,
        kv_start: Tensor,
        k_caches: list[Tensor],
        v_caches: list[Tensor],
        spoiled: Tensor | None = None,
    ) -> list[Tensor]:
        """The states that every layer reads, and those that leave the last one, [B, R, hidden] each."""
        w, turns = self.weights, self.turns(positions)
        row_depths, capacity = positions - (kv_len - kv_start)[:, None], k_caches[0].shape[2]
        read_by = [x]
        for number, (layer, k_cache, v_cache) in enumerate(zip(w.layers, k_caches, v_caches, strict=True)):
            if number:
                normed = self.norm(x, layer.input_norm)
            query = self.turned(self.project(normed, layer.q, layer.q_bias), layer.q_norm, turns)
            self.store(normed, layer, turns, k_cache, v_cache, slots, spoiled)
            sight = ancestor_mask, kv_len, kv_start, row_depths, node_depths
            visible = visibility(*sight, layer.window or None, capacity)
            scale = query.shape[-1] ** -0.5
            out, _ = attention.attend(rounded(query, k_cache), k_cache, v_cache, visible, scale, None)
            x = x + self.project(out.transpose(1, 2).flatten(2), layer.o, layer.o_bias)
            normed = self.norm(x, layer.second_norm)
            gate = self.project(normed, layer.gate, layer.gate_bias)
            gated = silu(gate) * self.project(normed, layer.up, layer.up_bias)
            x = x + self.project(gated, layer.down, layer.down_bias)
            read_by.append(x)
        return read_by


def rounded(x: Tensor, factor: Tensor) -> Tensor:
    """x as it is multiplied with ``factor``."""
    return x.bfloat16().float() if factor.dtype == torch.bfloat16 else x
