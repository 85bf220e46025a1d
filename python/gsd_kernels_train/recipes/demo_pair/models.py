"""Target and draft: their shapes, fresh weights, and ordinary checkpoint folders."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .tokenizer import MAX_POSITIONS, VOCAB_SIZE

TARGET_CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
DRAFT_CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}


def build_model(shape: dict[str, int], tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return a freshly initialised Llama with tied embeddings."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **shape,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id
    )
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.num_hidden_layers))
    return model


def save_pair_member(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write an ordinary checkpoint folder: float16 weights, config and tokenizer."""
    model.config.name_or_path = ""
    model.to(torch.float16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_member(folder: Path) -> LlamaForCausalLM:
    """Load a stored model in float32, ready for evaluation."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
