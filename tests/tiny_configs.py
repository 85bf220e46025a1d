"""A tiny config of any causal language model that transformers has, by the names of its fields."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from models import prompts
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import gsd_kernels as gsd

VOCAB = 64
WINDOW = 5
LAYERS = 2
MOST_PARAMETERS = 8_000_000


class Unbuildable(Exception):
    """No tiny config of this class."""


SIZES: dict[str, Any] = {
    **dict.fromkeys("hidden_size d_model n_embd embed_dim word_embed_proj_dim".split(), 32),
    **dict.fromkeys("embedding_size hidden_dim decoder_hidden_size".split(), 32),
    **dict.fromkeys("intermediate_size ffn_dim d_ff ffn_hidden_size decoder_ffn_dim".split(), 48),
    **dict.fromkeys(["encoder_ffn_dim"], 48),
    **dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size".split(), 32),
    **dict.fromkeys("shared_intermediate_size intermediate_size_mlp".split(), 32),
    **dict.fromkeys("moe_shared_expert_intermediate_size dense_intermediate_size".split(), 32),
    **dict.fromkeys("num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers".split(), 2),
    **dict.fromkeys("num_attention_heads n_head num_heads n_heads decoder_attention_heads".split(), 4),
    **dict.fromkeys(["encoder_attention_heads"], 4),
    **dict.fromkeys("num_key_value_heads num_kv_heads".split(), 2),
    **dict.fromkeys("head_dim attention_head_dim qk_nope_head_dim v_head_dim d_kv".split(), 8),
    **dict.fromkeys("swa_head_dim qk_rope_head_dim index_head_dim attention_head_size rotary_dim".split(), 8),
    **dict.fromkeys("q_lora_rank kv_lora_rank".split(), 16),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts moe_num_experts".split(), 4),
    **dict.fromkeys("num_experts_per_tok num_experts_per_token moe_top_k moe_k".split(), 2),
    **dict.fromkeys("n_group topk_group num_expert_group n_shared_experts moe_num_shared_experts".split(), 1),
    **dict.fromkeys("vocab_size vocab_size_per_layer_input unpadded_vocab_size".split(), VOCAB),
    **dict.fromkeys("max_position_embeddings n_positions n_ctx".split(), 128),
    **dict.fromkeys("sliding_window window_size attention_window_size".split(), WINDOW),
    **dict.fromkeys("first_k_dense_replace num_dense_layers".split(), 1),
    **dict.fromkeys("mamba_d_head mamba_head_dim linear_key_head_dim linear_value_head_dim".split(), 8),
    **dict.fromkeys("mamba_n_heads mamba_num_heads linear_num_key_heads linear_num_value_heads".split(), 4),
    **dict.fromkeys("mamba_d_state ssm_state_size state_size mamba_d_ssm lru_width".split(), 16),
    **dict.fromkeys(["num_nextn_predict_layers"], 0),
    "use_sliding_window": True,
    "max_window_layers": 1,
    "attention_chunk_size": WINDOW,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "laurel_rank": 8,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def shrunk(config_class: type[PretrainedConfig], layers: int) -> dict[str, Any]:
    """Arguments of ``config_class`` for a tiny model."""
    default = config_class()
    default.allow_global_per_layer_attribute_access = True
    fields: dict[str, Any] = {}
    for name in dir(default) if not vars(default) else list(vars(default)):
        value = getattr(default, name, None)
        if name == "_experts_implementation_internal":
            continue
        if isinstance(value, PretrainedConfig):
            fields[name] = {**shrunk(type(value), layers), "model_type": value.model_type}
        elif name in SIZES and (value is not None or name in ("sliding_window", "pad_token_id", "head_dim")):
            size = SIZES[name]
            fields[name] = layers if size == 2 and "layer" in name else size
        elif name.endswith("_token_id") and isinstance(value, int):
            fields[name] = VOCAB - 1
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:  # latent attention has as many heads of either
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    return fields


# What the names of the fields do not say.
CONV = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}  # as published
MORE: dict[str, dict[str, Any]] = {
    "BailingHybridForCausalLM": {"layer_group_size": 2},
    "BambaForCausalLM": {"attn_layer_indices": [1], "mamba_n_heads": 8},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "Dots1ForCausalLM": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 32},
    "Gemma3nForCausalLM": {"num_hidden_layers": 4, "num_kv_shared_layers": 2},
    "Gemma4ForCausalLM": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "GraniteMoeHybridForCausalLM": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"]},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "KimiLinearForCausalLM": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "Lfm2ForCausalLM": CONV,
    "Lfm2MoeForCausalLM": CONV,
    "Lfm3ForCausalLM": CONV,
    "Mamba2ForCausalLM": {"num_heads": 8},
    "MllamaForCausalLM": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "NemotronHForCausalLM": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "num_hidden_layers": 4,
        "n_groups": 2,
        "mamba_num_heads": 8,
    },
    "ReformerModelWithLMHead": {"is_decoder": True},
    "Zamba2ForCausalLM": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    "ZambaForCausalLM": {"layer_types": ["mamba", "hybrid"]},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}


def classes() -> list[str]:
    """Every causal language model of the installed transformers: names, since to import them all takes seconds."""
    return sorted({name for entry in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for name in _as_tuple(entry)})


def _as_tuple(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry


def build(name: str, layers: int = LAYERS, **more: Any) -> PreTrainedModel:
    """A tiny random model of this class in float64, with sharp, varied logits.

    Raises:
        Unbuildable: its config cannot be made tiny by the names of its fields.
    """
    model_class: type[PreTrainedModel] = getattr(transformers, name)
    try:
        config = model_class.config_class(**{**shrunk(model_class.config_class, layers), **MORE.get(name, {}), **more})
        with torch.device("meta"):
            large = sum(parameter.numel() for parameter in model_class(config).parameters())
        if large > MOST_PARAMETERS:
            raise Unbuildable(f"{large:,} parameters")
        torch.manual_seed(0)
        model = model_class(config).eval()
    except Unbuildable:
        raise
    except Exception as error:
        raise Unbuildable(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}") from error
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.set_experts_implementation("eager")  # the others are for float32 and less
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.double()


HYBRIDS = {
    "qwen3.5": ("Qwen3_5ForCausalLM", 4),
    "qwen3-next": ("Qwen3NextForCausalLM", 4),
    "lfm2": ("Lfm2ForCausalLM", 4),
    "bamba": ("BambaForCausalLM", 4),
    "nemotron-h": ("NemotronHForCausalLM", 4),
    "falcon-h1": ("FalconH1ForCausalLM", 2),
    "kimi": ("KimiLinearForCausalLM", 3),
    "zaya": ("ZayaForCausalLM", 2),
    "jamba": ("JambaForCausalLM", 2),
}
CHAIN = gsd.GraphConfig.preset("chain", depth=4)
TREE = gsd.GraphConfig(depth=3, width=3, branch=3, max_rows=24, merge_context=-1)


def build_hybrid(family: str) -> PreTrainedModel:
    """A new model with recurrent layers, in the layer pattern of what is published."""
    return build(*HYBRIDS[family])


@functools.lru_cache
def hybrid_inputs(batch: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts of one call, or the first of them alone."""
    found = prompts(3, 9, vocab=VOCAB)
    return found if batch == 3 else {name: value[:1] for name, value in found.items()}
