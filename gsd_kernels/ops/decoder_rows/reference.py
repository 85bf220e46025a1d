from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from ..dag_attention import reference as attention
from ..dag_attention.dense import visibility
from ..write_kv.reference import write_kv

if TYPE_CHECKING:
    from .api import DecoderWeights


def decoder_rows(
    weights: DecoderWeights,
    token_ids: Tensor,  # int32 [B, R]
    positions: Tensor,  # int32 [B, R]
    slots: Tensor,  # int32 [B, R]
    ancestor_mask: Tensor,  # int32 [B, R, words]
    kv_len: Tensor,  # int32 [B]
    kv_start: Tensor,  # int32 [B]
    k_caches: list[Tensor],
    v_caches: list[Tensor],
    keep: int,
) -> Tensor:
    w = weights

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight.float(), w.eps)

    def project(x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight.float())

    angles = positions[..., None].float() * w.inv_freq  # [B, R, D/2]
    cos, sin = (angles.cos() * w.rope_scale)[:, None], (angles.sin() * w.rope_scale)[:, None]  # [B, 1, R, D/2]

    def heads(x: Tensor, *, rotate: bool) -> Tensor:
        """[B, R, H·D] → [B, H, R, D]"""
        x = x.unflatten(-1, (-1, 2 * w.inv_freq.shape[0])).transpose(1, 2)
        if not rotate:
            return x
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    visible = visibility(ancestor_mask, kv_len, kv_start, None, None, None, None, k_caches[0].shape[2])
    x = torch.nn.functional.embedding(token_ids, w.embedding).float()  # [B, R, hidden]
    for layer, k_cache, v_cache in zip(w.layers, k_caches, v_caches, strict=True):
        norm_1, q, k, v, o, norm_2, gate, up, down = layer
        normed = norm(x, norm_1)
        key, value = heads(project(normed, k), rotate=True), heads(project(normed, v), rotate=False)
        write_kv(k_cache, v_cache, key.to(k_cache.dtype), value.to(v_cache.dtype), slots.long())
        query = heads(project(normed, q), rotate=True)
        out, _ = attention.attend(query, k_cache, v_cache, visible, query.shape[-1] ** -0.5, None)
        x = x + project(out.transpose(1, 2).flatten(2), o)
        normed = norm(x, norm_2)
        x = x + project(silu(project(normed, gate)) * project(normed, up), down)
    return project(norm(x[:, -keep:], w.final_norm), w.head)
