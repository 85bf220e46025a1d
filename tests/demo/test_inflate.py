"""An inflated model computes what its source computes, whatever grows."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gsd_kernels_cli import demo
from gsd_kernels_cli.demo.inflate import SHAPES, ModelShape, inflate

PUBLISHED_PARAMETERS = {
    "tinyllama-1.1b": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-2-70b": 68_976_648_192,
}

GROWTHS = {
    "same": {},
    "wider": {"hidden_size": 96},
    "wider by a ratio that is no square": {"hidden_size": 56},
    "wider MLP": {"intermediate_size": 200},
    "deeper": {"num_layers": 5},
    "more heads": {"num_heads": 8, "num_key_value_heads": 4},
    "larger groups": {"num_heads": 16},
    "grouped to one key/value head per query head": {"num_key_value_heads": 4},
    "larger heads": {"head_dim": 32},
    "larger vocabulary": {"vocab_size": 160, "hidden_size": 64, "tie_word_embeddings": False},
    "untied": {"tie_word_embeddings": False},
    "everything": {
        "hidden_size": 128,
        "intermediate_size": 160,
        "num_layers": 4,
        "num_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 16,
        "vocab_size": 300,
        "tie_word_embeddings": False,
    },
}


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


@pytest.mark.parametrize("growth", GROWTHS.values(), ids=GROWTHS)
def test_a_tiny_model_keeps_its_function(growth):
    source = tiny_llama()
    shape = replace(ModelShape.of(source.config), **growth)
    inflated = inflate(source, shape, seed=3)
    assert ModelShape.of(inflated.config) == shape
    assert sum(p.numel() for p in inflated.parameters()) == shape.num_parameters
    tokens = torch.randint(0, 97, (2, 33), generator=torch.Generator().manual_seed(1))
    assert_same_function(source, inflated, tokens)


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


def test_llama3_rotary_scaling_survives_larger_heads():
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 32, "rope_theta": 10000.0}
    source = tiny_llama(rope_parameters=rope)
    tokens = torch.randint(0, 97, (1, 60), generator=torch.Generator().manual_seed(1))
    assert_same_function(source, inflate(source, replace(ModelShape.of(source.config), head_dim=24)), tokens)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_added_tokens_are_never_picked_in_half_precision(dtype):
    source = tiny_llama()
    shape = replace(ModelShape.of(source.config), hidden_size=96, vocab_size=200)
    inflated = inflate(source, shape, dtype=dtype)
    assert {p.dtype for p in inflated.parameters()} == {dtype}
    logits = inflated(torch.randint(0, 97, (2, 33))).logits
    assert not logits.isnan().any()
    assert logits[..., 97:].max() < logits[..., :97].min() - 50


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_have_the_published_size(name):
    target, _, _ = demo.load()
    inflated = inflate(target, name, dtype=torch.bfloat16, device="meta")
    count = sum(p.numel() for p in inflated.parameters())
    assert count == SHAPES[name].num_parameters
    assert ModelShape.of(inflated.config) == SHAPES[name]
    assert count == PUBLISHED_PARAMETERS.get(name, count)
    if name == "250m":
        assert 240e6 < count < 260e6


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
