"""A small draft's forward as one operator, where that is possible.

A draft of a few million parameters spends most of a forward in calling modules and operators. Its rows can go through
:func:`gsd_kernels.ops.decoder_rows` instead; what it proposes may differ by rounding, what is accepted cannot.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel

from gsd_kernels.backends import unavailable_reason
from gsd_kernels.ops.decoder_rows import DecoderWeights, decoder_rows
from gsd_kernels.ops.decoder_rows.api import FLOATS, LANES

from .runner import RowModel

logger = logging.getLogger("gsd_kernels")
CLASSES = (LlamaForCausalLM, MistralForCausalLM)
MAX_PARAMETERS = 8_000_000  # beyond that arithmetic dominates, which PyTorch's matrix products are better at
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # one set of frequencies for all lengths


def why_not(model: PreTrainedModel, backend: str) -> str | None:
    """What keeps ``model`` from being forwarded by one operator, or ``None``."""
    config = model.config
    reason = unavailable_reason("cpu", model.device)
    if backend not in ("auto", "cpu") or reason is not None:
        return reason or f"backend {backend!r} has no such operator"
    if type(model) not in CLASSES:
        return f"{type(model).__name__} is not one of {', '.join(c.__name__ for c in CLASSES)}"
    if model.num_parameters() > MAX_PARAMETERS:
        return f"more than {MAX_PARAMETERS:,} parameters"
    if config.hidden_act != "silu" or getattr(config, "sliding_window", None) is not None:
        return "another activation than silu, or a sliding window"
    if (config.rope_parameters or {}).get("rope_type", "default") not in STATIC_ROPE:
        return "frequencies of the rotary embedding that depend on the length"
    sizes = (config.hidden_size, config.intermediate_size, model.model.layers[0].self_attn.head_dim)
    if any(size % LANES for size in sizes):
        return f"a hidden, inner or head size that is no multiple of {LANES}"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return f"{name or 'the model'} has a hook"
        if isinstance(module, nn.Linear) and (type(module) is not nn.Linear or module.bias is not None):
            return f"{name} is not a plain nn.Linear without bias"
    for name, parameter in model.named_parameters():
        if parameter.dtype not in FLOATS or not parameter.is_contiguous() or type(parameter) is not nn.Parameter:
            return f"{name} is not a plain tensor of float32, bfloat16 or float16"
    return None


def weights_of(model: PreTrainedModel) -> DecoderWeights:
    """The parameters as they lie in the model."""
    decoder, config = model.model, model.config
    layers = []
    for layer in decoder.layers:
        a, m = layer.self_attn, layer.mlp
        parts = (layer.input_layernorm, a.q_proj, a.k_proj, a.v_proj, a.o_proj)
        parts += (layer.post_attention_layernorm, m.gate_proj, m.up_proj, m.down_proj)
        layers.append(tuple(part.weight.detach() for part in parts))
    return DecoderWeights(
        embedding=decoder.embed_tokens.weight.detach(),
        layers=layers,
        final_norm=decoder.norm.weight.detach(),
        head=model.lm_head.weight.detach(),
        inv_freq=decoder.rotary_emb.inv_freq.float(),
        rope_scale=float(decoder.rotary_emb.attention_scaling),
        heads=config.num_attention_heads,
        eps=config.rms_norm_eps,
    )


class SmallDraft(RowModel):
    """A :class:`RowModel` whose graph rows are one operator; prompts still go through the model."""

    def __init__(self, model: PreTrainedModel, capacity: int, kv_start: Tensor, backend: str) -> None:
        super().__init__(model, capacity, kv_start, backend)
        self.weights = weights_of(model)
        self.kv_heads, self.head_dim = model.config.num_key_value_heads, model.model.layers[0].self_attn.head_dim

    def caches(self, batch: int) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of every layer, allocated if no prompt was read."""
        for layer in self.cache.layers:
            if not layer.is_initialized:
                layer.lazy_initialization(self.model.lm_head.weight.new_empty(batch, self.kv_heads, 0, self.head_dim))
        return [layer.keys for layer in self.cache.layers], [layer.values for layer in self.cache.layers]

    def rows(
        self,
        token_ids: Tensor,  # int [B, R]
        kv_len: Tensor,  # int32 [B]
        slots: Tensor,  # int [B, R] or [R]
        ancestor_mask: Tensor,  # int32 [B, R, words]
        depths: Tensor,  # int32 [B, R]
        node_depths: Tensor,
        keep: int,
    ) -> Tensor:
        """As :meth:`RowModel.rows`; float32 logits."""
        keys, values = self.caches(token_ids.shape[0])
        return decoder_rows(
            self.weights,
            self.known(token_ids).to(torch.int32),
            (kv_len - self.kv_start)[:, None] + depths,
            (kv_len[:, None] + slots).to(torch.int32),
            ancestor_mask,
            kv_len,
            self.kv_start,
            keys,
            values,
            keep=keep,
            backend=self.backend,
        )


def draft_rows(model: PreTrainedModel, capacity: int, kv_start: Tensor, backend: str) -> RowModel:
    """The fastest way to forward a draft's rows."""
    reason = why_not(model, backend)
    if reason is None:
        return SmallDraft(model, capacity, kv_start, backend)
    if model.device.type == "cpu":
        logger.debug("the draft's rows go through its modules: %s", reason)
    return RowModel(model, capacity, kv_start, backend)
