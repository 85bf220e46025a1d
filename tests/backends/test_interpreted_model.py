"""A tiny model generates through the Triton kernels: the tokens of the reference, hence of the model alone."""

from __future__ import annotations

import models
import pytest
import torch

import gsd_kernels as gsd

pytestmark = [pytest.mark.quick, pytest.mark.interpreter]
CONFIG = gsd.GraphConfig(depth=2, width=2, branch=2, max_rows=6, merge_context=0)
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 20, "seed": 5}


@pytest.mark.parametrize(
    ("family", "sampling", "tokens"), [("llama-gqa", {}, 6), ("mistral-window", SAMPLING, 3)], ids=["greedy", "sampled"]
)
def test_tokens_equal_the_reference(family, sampling, tokens):
    target = models.tiny(family, dtype=torch.float32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    common = {
        **models.prompts(1, 15),
        **sampling,
        "max_new_tokens": tokens,
        "assistant_model": models.noised(target, 0.02),
        "graph_config": CONFIG,
        "draft_sources": ("model",),
        "return_dict_in_generate": True,
    }
    got = gsd.generate(target, **common, backend="triton")
    expected = gsd.generate(target, **common, backend="reference")
    assert torch.equal(got.sequences, expected.sequences)
    assert got.stats.steps == expected.stats.steps
    assert sampling or got.stats.steps < tokens - 1, "nothing was accepted"
