"""Decoder layers of drafters: parts of transformers' LLaMA and Qwen3, with attention over a cache of graph rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from ..model.attention import GraphInputs
from ..model.cache import GraphCache

Turns = tuple[Tensor, Tensor]
"""Cosines and sines of a row's position, [B, R, head_dim] each."""


class Rotary:
    """Position → rotation, in float32 on any device. No module, because a module's casts would round frequencies.

    Args:
        config: of the layers; its own rotary settings, not the target's.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config
        self.by_device: dict[torch.device, LlamaRotaryEmbedding] = {}

    def __call__(self, like: Tensor, positions: Tensor) -> Turns:
        """Of int positions [B, R], in the dtype and on the device of ``like``."""
        return self.on(like.device)(like, positions)

    def frequencies(self, device: torch.device) -> tuple[Tensor, float]:
        """Frequencies of the rotation, float32 [head_dim / 2], and what cosines and sines are multiplied with."""
        rotary = self.on(device)
        return rotary.inv_freq.float(), float(rotary.attention_scaling)

    def on(self, device: torch.device) -> LlamaRotaryEmbedding:
        """transformers' module, on a device."""
        if device not in self.by_device:
            with torch.device("cpu"):
                self.by_device[device] = LlamaRotaryEmbedding(self.config).to(device)
        return self.by_device[device]


@dataclass
class RowPass:
    """One forward of rows: where their keys and values go, and what each of them sees.

    Attributes:
        cache: of the drafter's layers, in its ``writing`` block.
        inputs: of layers that see all of the text; ``None`` where keys and values are stored only.
        windowed: of layers with a sliding window, where that differs.
    """

    cache: GraphCache
    inputs: GraphInputs | None
    windowed: GraphInputs | None = None

    def attend(self, module: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store keys and values [B, Hkv, R, D] of a layer, and attend: [B, Hq, R, D]."""
        keys, values = self.cache.layers[module.layer].update(key, value)
        inputs = self.inputs if module.window is None or self.windowed is None else self.windowed
        options = {"sliding_window": module.window}
        return inputs.attend(module, query, keys, values, None, module.scaling, options)


class Attention(nn.Module):
    """Grouped-query attention, with norms of the heads in Qwen3's layers.

    Args:
        config: of the layers.
        layer: index of the layer.
        inputs: width of what queries, keys and values are made of.
    """

    def __init__(self, config: PretrainedConfig, layer: int, inputs: int) -> None:
        super().__init__()
        self.layer, self.head_dim, self.scaling = layer, config.head_dim, config.head_dim**-0.5
        types = getattr(config, "layer_types", None) or ()
        sliding = layer < len(types) and types[layer] == "sliding_attention"
        self.window: int | None = config.sliding_window if sliding else None
        queries, keys = (n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        bias = bool(config.attention_bias)
        self.q_proj = nn.Linear(inputs, queries, bias=bias)
        self.k_proj = nn.Linear(inputs, keys, bias=bias)
        self.v_proj = nn.Linear(inputs, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)
        norms = config.model_type == "qwen3"
        self.q_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if norms else None
        self.k_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if norms else None

    def forward(self, hidden: Tensor, turns: Turns, rows: RowPass) -> Tensor:
        """[B, R, inputs] → [B, R, hidden_size]."""
        query = self.heads(self.q_proj(hidden), self.q_norm)
        key, value = self.heads(self.k_proj(hidden), self.k_norm), self.heads(self.v_proj(hidden))
        query, key = apply_rotary_pos_emb(query, key, *turns)
        out = rows.attend(self, query, key, value)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def store(self, hidden: Tensor, turns: Turns, rows: RowPass) -> None:
        """Store keys and values of rows [B, R, inputs] that ask nothing themselves."""
        key, value = self.heads(self.k_proj(hidden), self.k_norm), self.heads(self.v_proj(hidden))
        rows.cache.layers[self.layer].update(apply_rotary_pos_emb(key, key, *turns)[1], value)

    def heads(self, projected: Tensor, norm: nn.Module | None = None) -> Tensor:
        """[B, R, H · D] → [B, H, R, D]."""
        found = projected.unflatten(-1, (-1, self.head_dim))
        return (found if norm is None else norm(found)).transpose(1, 2)


class Layer(nn.Module):
    """A decoder layer.

    Args:
        config, layer, inputs: as of :class:`Attention`; ``None``: the width of the layers.
    """

    def __init__(self, config: PretrainedConfig, layer: int, inputs: int | None = None) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, inputs or config.hidden_size)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = (Qwen3MLP if config.model_type == "qwen3" else LlamaMLP)(config)

    def forward(self, hidden: Tensor, turns: Turns, rows: RowPass) -> Tensor:
        """[B, R, D] → [B, R, D]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), turns, rows)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
