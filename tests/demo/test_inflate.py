"""An inflated model computes what its source computes, whatever grows."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gsd_kernels_cli.demo.inflate import ModelShape, inflate


def tiny_llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    """A random Llama with norms and output projections that are large enough to matter."""
    config = LlamaConfig(
        **{
            "vocab_size": 97,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            **changes,
        }
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif "proj" in name:
            torch.nn.init.normal_(parameter, std=0.2)
        else:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


@torch.no_grad()
def assert_same_function(source: LlamaForCausalLM, inflated: LlamaForCausalLM, tokens: torch.Tensor) -> None:
    vocabulary = source.config.vocab_size
    want, got = source(tokens).logits, inflated(tokens).logits
    assert want.std() > 0.1
    assert got.shape[-1] == inflated.config.vocab_size
    torch.testing.assert_close(got[..., :vocabulary], want, atol=1e-4, rtol=1e-4)
    if inflated.config.vocab_size > vocabulary:
        assert got[..., vocabulary:].max() < want.min() - 50
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(tokens)
    assert torch.equal(
        source.generate(tokens, attention_mask=mask, **settings),
        inflated.generate(tokens, attention_mask=mask, **settings),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {"rms_norm_eps": 1e-2},
    ],
    ids=str,
)
def test_every_kind_of_source_keeps_its_function(changes):
    source = tiny_llama(seed=1, **changes)
    shape = ModelShape(96, 96, 3, 16, 8, 24, 128)
    tokens = torch.randint(0, 97, (2, 33), generator=torch.Generator().manual_seed(1))
    assert_same_function(source, inflate(source, shape), tokens)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_added_tokens_are_never_picked_in_half_precision(dtype):
    source = tiny_llama()
    shape = replace(ModelShape.of(source.config), hidden_size=96, vocab_size=200)
    inflated = inflate(source, shape, dtype=dtype)
    assert {p.dtype for p in inflated.parameters()} == {dtype}
    logits = inflated(torch.randint(0, 97, (2, 33))).logits
    assert not logits.isnan().any()
    assert logits[..., 97:].max() < logits[..., :97].min() - 50


@pytest.mark.parametrize(
    ("growth", "named"),
    [
        ({"hidden_size": 32}, "hidden_size"),
        ({"intermediate_size": 79}, "intermediate_size"),
        ({"num_layers": 1}, "num_layers"),
        ({"num_heads": 2}, "num_heads"),
        ({"num_heads": 6, "num_key_value_heads": 4}, "num_key_value_heads"),
        ({"num_key_value_heads": 1}, "num_key_value_heads"),
        ({"num_heads": 12, "hidden_size": 64}, "hidden_size"),
        ({"head_dim": 12}, "head_dim"),
        ({"vocab_size": 96}, "vocab_size"),
        ({"vocab_size": 98}, "vocab_size"),
    ],
    ids=str,
)
def test_impossible_shapes_are_refused_by_name(growth, named):
    source = tiny_llama()
    with pytest.raises(ValueError, match=f"shape.{named}"):
        inflate(source, replace(ModelShape.of(source.config), **growth))
