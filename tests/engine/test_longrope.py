"""``longrope``: the text is what transformers writes, on either side of the border between its factors and across."""

from __future__ import annotations

import functools

import models
import pytest
import torch
import transformers

import gsd_kernels as gsd

VOCAB, ORIGINAL, HEAD = 40, 24, 8
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0, 1.3, 1.1, 1.7],
    "long_factor": [3.0, 9.0, 5.0, 20.0],
}
LENGTHS = {"short": (6, 12), "ends at the border": (12, 12), "crosses": (14, 22), "from the border": (24, 12)}
LENGTHS |= {"behind the border": (25, 9), "long": (40, 9)}
WAYS = {
    "draft": lambda target: {"assistant_model": models.noised(target, 0.02), "graph_config": "tree"},
    "history": lambda target: {"draft_sources": ("history",), "graph_config": "tree"},
    "auto": lambda target: {"assistant_model": models.noised(target, 0.02), "graph_config": "auto"},
    "layer_skip": lambda target: {"assistant_model": gsd.LayerSkip(target, mlp=[1]), "graph_config": "tree"},
}


@functools.lru_cache
def target_of(family: str):
    """A model of which other factors give other texts."""
    if family == "llama":
        model = models.tiny(vocab_size=VOCAB, num_attention_heads=4, max_position_embeddings=96, rope_parameters=ROPE)
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        ids = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = transformers.Phi3Config(
            **sizes, **ids, num_key_value_heads=2, max_position_embeddings=96,
            original_max_position_embeddings=ORIGINAL, rope_parameters=ROPE,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.Phi3ForCausalLM(config).eval()
        models.add_noise((p for p in model.parameters() if p.dim() > 1), 0.2, 1)
        model = model.double()
    model.generation_config.eos_token_id = None
    return model


def prompt(length: int, batch: int = 1, *, seed: int = 3):
    return models.prompts(batch, length, seed=seed, vocab=VOCAB)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_the_text_is_transformers_own(family, lengths, batch, way):
    target, (length, new) = target_of(family), LENGTHS[lengths]
    call = {**prompt(length, batch), "max_new_tokens": new, "do_sample": False}
    want = target.generate(**call)
    assert torch.equal(gsd.generate(target, **call, **WAYS[way](target)), want)
