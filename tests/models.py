"""Tiny random models whose drafts agree with their target often, but not always."""

from __future__ import annotations

import copy
import string
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 97
CHARACTERS = string.ascii_letters + string.digits + string.punctuation  # of the ids from 3 on

FAMILIES = {
    "llama-gqa": ("Llama", {"num_key_value_heads": 2}),
    "llama-mha": ("Llama", {"num_key_value_heads": 8}),
    "llama-tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "mistral-window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 13}),
}


def tiny(family: str = "llama-gqa", *, seed: int = 0, dtype: torch.dtype = torch.float64, **config) -> PreTrainedModel:
    """A random model with sharp, varied logits."""
    name, extra = FAMILIES[family]
    base = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(seed)
    model_config = getattr(transformers, f"{name}Config")(**{**base, **extra, **config})
    model = getattr(transformers, f"{name}ForCausalLM")(model_config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.generation_config.eos_token_id = model_config.eos_token_id
    return model.to(dtype)


def endless(family: str = "llama-gqa", **config) -> PreTrainedModel:
    """A model whose texts do not end."""
    model = tiny(family, **config)
    model.generation_config.eos_token_id = None
    return model


def noised(target: PreTrainedModel, noise: float = 0.05, *, seed: int = 1) -> PreTrainedModel:
    """A draft that is the target with noise on its weights: right often, wrong often.

    Of a float64 target it is float32, which one operator forwards; ``.double()`` for one that goes through its modules.
    """
    draft = copy.deepcopy(target)
    add_noise((parameter for parameter in draft.parameters() if parameter.dim() > 1), noise, seed)
    return draft.float() if target.dtype == torch.float64 else draft


def add_noise(parameters: Iterable[torch.nn.Parameter], std: float, seed: int) -> None:
    """Move weights in place."""
    gen = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.data += std * torch.randn(parameter.shape, generator=gen).to(parameter)


def prompts(
    batch: int, length: int, *, seed: int = 0, ragged: bool = True, vocab: int = VOCAB
) -> dict[str, torch.Tensor]:
    """Random left-padded prompts; the first row is full."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (batch, length), generator=gen)
    mask = torch.ones_like(ids)
    if ragged:
        for row in range(1, batch):
            pad = int(torch.randint(0, length, (), generator=gen))
            ids[row, :pad], mask[row, :pad] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def tokenizer(vocab_size: int = VOCAB):
    """A byte-level tokenizer without merges: ids 0 … 2 are special, every other id is one printable character."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, **{c: 3 + i for i, c in enumerate(CHARACTERS[: vocab_size - 3])}}
    backend = Tokenizer(BPE(vocab=vocab, merges=[], byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def rotated(first: Iterable[Any], second: Sequence[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every pair of the first two, beside which values of the others come in turn, so that these meet both."""
    return [
        (a, b, *(other[(i + k * j) % len(other)] for k, other in enumerate(others, 1)))
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]
