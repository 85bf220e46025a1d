from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from ..dag_attention import reference as attention
from ..dag_attention.dense import visibility
from ..packed import PackedMatrix, codes
from ..write_kv.reference import write_kv
from .weights import DecoderWeights


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
    states: Sequence[int],
    keep: int,
) -> tuple[Tensor, Tensor, Tensor]:
    w = weights if not weights.packing[0] else weights.dense()

    def rounded(x: Tensor, factor: Tensor) -> Tensor:
        """x as it is multiplied with ``factor``."""
        return x.bfloat16().float() if factor.dtype == torch.bfloat16 else x

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight.float(), w.eps)

    def project(x: Tensor, weight: Tensor | PackedMatrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, PackedMatrix):
            out = codes.linear(x, weight, w.dtype)
            return out if bias is None else out + bias.float()
        return linear(rounded(x, weight), weight.float(), None if bias is None else bias.float())

    def split(x: Tensor) -> Tensor:
        """[B, R, H·D] → [B, H, R, D]"""
        return x.unflatten(-1, (-1, 2 * w.inv_freq.shape[0])).transpose(1, 2)

    angles = positions[..., None].float() * w.inv_freq  # [B, R, D/2]
    cos, sin = (angles.cos() * w.rope_scale)[:, None], (angles.sin() * w.rope_scale)[:, None]  # [B, 1, R, D/2]

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        a, b = (x if weight is None else norm(x, weight)).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    row_depths, capacity = positions - (kv_len - kv_start)[:, None], k_caches[0].shape[2]
    x = torch.nn.functional.embedding(token_ids, w.embedding).float()  # [B, R, hidden]
    read_by = [x]
    for layer, k_cache, v_cache in zip(w.layers, k_caches, v_caches, strict=True):
        normed = norm(x, layer.input_norm)
        query = turned(split(project(normed, layer.q, layer.q_bias)), layer.q_norm)
        key = turned(split(project(normed, layer.k, layer.k_bias)), layer.k_norm)
        value = split(project(normed, layer.v, layer.v_bias))
        write_kv(k_cache, v_cache, key.to(k_cache.dtype), value.to(v_cache.dtype), slots.long())
        visible = visibility(ancestor_mask, kv_len, kv_start, row_depths, node_depths, layer.window or None, capacity)
        out, _ = attention.attend(rounded(query, k_cache), k_cache, v_cache, visible, query.shape[-1] ** -0.5, None)
        x = x + project(out.transpose(1, 2).flatten(2), layer.o, layer.o_bias)
        normed = norm(x, layer.second_norm)
        gated = silu(project(normed, layer.gate, layer.gate_bias)) * project(normed, layer.up, layer.up_bias)
        x = x + project(gated, layer.down, layer.down_bias)
        read_by.append(x)
    read_by[-1] = norm(x, w.final_norm)
    hidden = read_by[-1][:, x.shape[1] - keep :]
    return (
        project(hidden, w.head),
        hidden,
        torch.stack([read_by[i] for i in states]) if states else x.new_empty(0, *x.shape),
    )
