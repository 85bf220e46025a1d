"""The launches of a forward's attention without the forward: kernels are compiled when they are first launched."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PretrainedConfig

from gsd_kernels import dag_attention, write_kv
from gsd_kernels.graph import num_words

from .attention import AttentionKind
from .cache import GraphCache


def launch_attention(
    cache: GraphCache,
    config: PretrainedConfig,
    kv_len: Tensor,
    kv_start: Tensor,
    count: int,
    nodes: int,
    kinds: Iterable[AttentionKind],
    backend: str,
) -> None:
    """Write keys of ``count`` rows behind the prefix and attend, once for each geometry of layers and kind of call.

    Args:
        cache: of the layers; those that have stored nothing yet are passed over.
        config: of the layers.
        kv_len, kv_start: int32 [B], the prefix; what lies behind it is written.
        count: rows.
        nodes: slots that a row may see behind the prefix.
        kinds: of the attention calls; of none, keys are stored only.
        backend: of the attention.
    """
    layers = {(layer.keys.shape, layer.values.shape): layer for layer in cache.layers if layer.is_initialized}
    group = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    for layer in layers.values():
        batch, heads, _, size = layer.keys.shape
        lengths, starts = kv_len.to(layer.device), kv_start.to(layer.device)
        new = [
            cached.new_zeros(batch, count, cached.shape[1], cached.shape[3]).transpose(1, 2)
            for cached in (layer.keys, layer.values)
        ]
        positions = lengths[:, None].long() + torch.arange(count, device=layer.device)
        spoiled = cache.new_marks(count, layer.device)
        write_kv(layer.keys, layer.values, *new, positions, spoiled=spoiled, backend=cache.write_backend)
        for kind in dict.fromkeys(kinds):
            dag_attention(
                layer.keys.new_zeros(batch, count, group * heads, size).transpose(1, 2),
                layer.keys,
                layer.values,
                lengths.new_zeros(batch, count, num_words(nodes)),
                lengths,
                kv_start=starts,
                row_depths=lengths.new_zeros(batch, count),
                node_depths=lengths.new_zeros(batch, nodes),
                softcap=getattr(config, "attn_logit_softcapping", None),
                sliding_window=kind.window,
                chunk=kind.chunk,
                sinks=None if kind.sinks is None else layer.keys.new_zeros(group * heads, dtype=kind.sinks),
                backend=backend,
            )
