"""Weights that hold NaN or infinite numbers: named, or as transformers has it; never a text like any other."""

from __future__ import annotations

import copy
import math

import models
import pytest
import torch
import transformers
from rotated import rotated

import gsd_kernels as gsd

IDS = torch.tensor([[5, 7, 9, 11]])
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
CALL = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
GRAPH = {"graph_config": "tree", "draft_sources": ("history",)}


def llama(dtype=torch.float32):
    return models.tiny("qwen2", dtype=dtype)  # which has biases


def gpt2(dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=64)
    return transformers.GPT2LMHeadModel(config).eval().to(dtype)


def untied(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def spoil(model, path, index, value):
    with torch.no_grad():
        model.get_parameter(path)[index] = value
    return model


AT = "model.layers.1"
WEIGHTS = {
    "a key": (llama, f"{AT}.self_attn.k_proj.weight", (3, 5)),
    "all keys": (llama, f"{AT}.self_attn.k_proj.weight", ...),
    "a value": (llama, f"{AT}.self_attn.v_proj.weight", (0, 0)),
    "a key's bias": (llama, f"{AT}.self_attn.k_proj.bias", 1),
    "a norm": (llama, f"{AT}.input_layernorm.weight", 2),
    "an MLP": (llama, f"{AT}.mlp.down_proj.weight", (3, 3)),
    "GPT-2's values": (gpt2, "transformer.h.0.attn.c_attn.weight", (3, 80)),
    "GPT-2's keys": (gpt2, "transformer.h.1.attn.c_attn.bias", 40),
}


PACKED = {
    "a packed weight": (
        lambda model: model.model.layers[1].self_attn.v_proj,
        r"model\.layers\.1\.self_attn\.v_proj\.packed",
    ),
    "a packed embedding": (lambda model: model.get_input_embeddings(), "the embedding of token 7"),
}


@pytest.mark.parametrize(("name", "value", "dtype"), rotated(WEIGHTS, (math.nan, math.inf), DTYPES), ids=str)
def test_a_weight_that_all_tokens_go_through_is_named(name, dtype, value):
    """In a patched model as well; nothing is looked through before logits are NaN."""
    make, path, index = WEIGHTS[name]
    model = spoil(make(dtype), path, index, value)
    handle = gsd.patch(model, **GRAPH)
    for ids, options in ((IDS, {}), (IDS[:, :1], {}), (IDS, {"graph_config": "plain"})):
        with pytest.raises(ValueError, match=f"^logits: NaN, since {path} of the model holds NaN"):
            model.generate(ids, **CALL, **options)
    assert handle.patched


@pytest.mark.parametrize(("name", "value"), rotated(PACKED, (math.nan, math.inf)), ids=str)
def test_a_packed_weight_is_named(name, value):
    where, said = PACKED[name]
    model = gsd.pack(models.tiny(dtype=torch.float32, hidden_size=64, intermediate_size=96), "q4_0")
    where(model).packed[7, :2] = torch.tensor([value], dtype=torch.float16).view(torch.uint8)
    with pytest.raises(ValueError, match=f"^logits: NaN, since {said} "):
        gsd.generate(model, IDS, **CALL)


@pytest.mark.parametrize(
    ("make", "dtype", "value"),
    rotated((llama, gpt2), DTYPES, (math.nan, -math.inf)),
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_an_embedding(make, dtype, value):
    """A token that the text has is named; of one that it has not, nothing shows, and the operator goes on."""
    plain = untied(make(dtype))
    path = next(name for name, p in plain.named_parameters() if p is plain.get_input_embeddings().weight)
    out = gsd.generate(plain, IDS, **CALL, **GRAPH, return_dict_in_generate=True)
    for token in (7, 11):
        model = spoil(copy.deepcopy(plain), path, token, value)
        for ids in (IDS, torch.tensor([[token]])):
            with pytest.raises(ValueError, match=f"^logits: NaN, since the embedding of token {token} "):
                gsd.generate(model, ids, **CALL, **GRAPH)
    everything = set(range(97)) - set(out.sequences[0].tolist())
    for unused in ([min(everything)], sorted(everything)):  # those of the proof's own text too
        model = spoil(copy.deepcopy(plain), path, unused, value)
        for _ in range(2):
            found = gsd.generate(model, IDS, **CALL, **GRAPH, return_dict_in_generate=True)
            assert torch.equal(found.sequences, out.sequences) and found.stats.why_modules == out.stats.why_modules


def test_a_position_that_no_token_has():
    model = gpt2()
    expected = gsd.generate(model, IDS, **CALL)
    spoil(model, "transformer.wpe.weight", 60, math.nan)
    assert torch.equal(gsd.generate(model, IDS, **CALL), expected)
    spoil(model, "transformer.wpe.weight", 1, math.nan)
    with pytest.raises(ValueError, match=r"^logits: NaN, since transformer\.wpe computes NaN"):
        gsd.generate(model, IDS, **CALL)


OVERFLOWS = {
    "keys": (llama, f"{AT}.self_attn.k_proj.weight", f"{AT}.self_attn.k_proj"),
    "values": (llama, f"{AT}.self_attn.v_proj.weight", f"{AT}.self_attn.v_proj"),
    "an MLP before keys": (llama, "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj"),
    "GPT-2's keys and values": (gpt2, "transformer.h.1.attn.c_attn.weight", "transformer.h.1.attn.c_attn"),
}


@pytest.mark.parametrize(
    ("name", "fused", "dtype"),
    rotated(OVERFLOWS, (True, False), (torch.float32, torch.bfloat16, torch.float16)),
    ids=str,
)
def test_numbers_that_overflow_name_their_layer(name, dtype, fused, monkeypatch):
    """From finite weights: in a prompt, in one that is behind padding, and at the first row of a graph."""
    monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", str(int(fused)))
    make, path, layer = OVERFLOWS[name]
    model = make(dtype)
    with torch.no_grad():
        model.get_parameter(path)[-3:] = torch.finfo(dtype).max
    padded, mask = torch.tensor([[0, 0, 5, 7], [3, 5, 7, 9]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    for ids, options in ((IDS, GRAPH), (IDS[:, :1], {}), (padded, GRAPH | {"attention_mask": mask})):
        with pytest.raises(ValueError, match=f"^logits: NaN, since {layer} computes NaN"):
            gsd.generate(model, ids, **CALL, **options)


def rare(dtype, name):
    """A model whose keys overflow at token 40 alone."""
    model = llama(dtype)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 0.0
        model.get_input_embeddings().weight[40] = 0.0
        model.get_input_embeddings().weight[40, 0] = 1.0
        weight = model.get_parameter(f"model.layers.0.self_attn.{name}.weight")
        weight[2:4] = 0.0
        weight[2:4, 0] = torch.finfo(dtype).max
    return model


@pytest.mark.parametrize("fused", [True, False], ids=["operator", "modules"])
@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
def test_a_token_that_overflows_is_none_of_the_others_business(name, fused, monkeypatch):
    """Drafted rows, other texts of a batch and, to the operator, padding may hold it; a prompt may not, wherever."""
    monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", str(int(fused)))
    model = rare(torch.float32, name)
    expected = type(model).generate(model, IDS, **CALL)
    assert 40 not in expected[0].tolist()
    if fused:  # transformers' attention lets masked keys that are not finite through, in the modules too
        padded, mask = torch.tensor([[40, 40, *IDS[0].tolist()]]), torch.tensor([[0, 0, 1, 1, 1, 1]])
        assert torch.equal(gsd.generate(model, padded, attention_mask=mask, **CALL, **GRAPH)[:, 2:], expected)
    drafted = torch.tensor([token for pair in zip(expected[0].tolist(), [40] * 99, strict=False) for token in pair])
    assert torch.equal(gsd.generate(model, IDS, **CALL, **GRAPH, reference_ids=drafted), expected)
    invalid = CALL | {"remove_invalid_values": True}
    for at in (0, 1, 3):
        ids = IDS.clone()
        ids[0, at] = 40
        with pytest.raises(ValueError, match=rf"^logits: NaN, since model\.layers\.0\.self_attn\.{name} "):
            gsd.generate(model, ids, **CALL, **GRAPH)
        both = torch.cat([ids, IDS])
        own = type(model).generate(model, both, **invalid)
        assert torch.equal(own[1:], expected)
        if not own[0, 4:].any():  # else a key of −∞ was left out
            assert torch.equal(gsd.generate(model, both, **invalid, **GRAPH), own)


@pytest.mark.parametrize("processed", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2"])
def test_a_token_of_the_text_is_named_as_one_of_the_prompt_is(make, processed):
    model = untied(make())
    text = gsd.generate(model, IDS, **CALL)[0].tolist()
    path = next(name for name, p in model.named_parameters() if p is model.get_input_embeddings().weight)
    token = next(token for token in text[4:-1] if token not in text[:4])
    spoil(model, path, token, math.nan)
    options = {"logits_processor": [lambda ids, scores: scores]} if processed else {}
    with pytest.raises(ValueError, match=f"^logits: NaN, since the embedding of token {token} "):
        gsd.generate(model, IDS, **CALL, **GRAPH, **options)
