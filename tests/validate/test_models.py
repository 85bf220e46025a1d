"""What models are served exactly, or refused by name: layers, masks, windows, configs, weights that are not finite."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
import types

import model_sweep
import models
import pytest
import tiny_configs
import torch
import transformers
from models import rotated
from texts.covering import SUBJECTS
from torch import nn
from transformers.models.llama import modeling_llama

import gsd_kernels as gsd
from gsd_kernels_hf.model import probe
from gsd_kernels_hf.model.facts import Facts
from gsd_kernels_hf.validate import check_heads

torch.set_num_threads(1)
VOCAB = 48
TOKENS = {"max_new_tokens": 12, "do_sample": False}


def llama(**config):
    model = models.tiny(**{"vocab_size": VOCAB, **config})
    model.generation_config.eos_token_id = None
    return model


@functools.lru_cache
def prompt() -> dict[str, torch.Tensor]:
    return models.prompts(2, 8, seed=3, vocab=VOCAB)


@contextlib.contextmanager
def unchanged(model):
    """The model is bit for bit as it was, a forward of it too."""

    def logits():
        with torch.no_grad():
            return model(input_ids=prompt()["input_ids"]).logits

    state, before = model_sweep.state_of(model), logits()
    yield
    assert model_sweep.same(state, model_sweep.state_of(model))
    assert torch.equal(before.nan_to_num(7.0), logits().nan_to_num(7.0))


def refused(model, match: str) -> None:
    """Each way to a model is closed, before anything happens."""
    name = type(model).__name__
    ids = prompt()["input_ids"][:1]
    silent = types.SimpleNamespace(put=pytest.fail, end=pytest.fail)
    call = {"graph_config": "tree", "draft_sources": ("history",), "streamer": silent}
    with unchanged(model):
        for attempt in (
            lambda: gsd.generate(model, ids, **call, **TOKENS),
            lambda: gsd.patch(model),
            lambda: model.generate(ids, custom_generate=gsd.GraphDecoder(**call), **TOKENS),
        ):
            with pytest.raises(ValueError, match=rf"^model: {name}.*{match}"):
                attempt()
        with pytest.raises(ValueError, match=rf"^assistant_model: {name}.*{match}"):
            gsd.generate(llama(), ids, assistant_model=model, **TOKENS)


def unpadded() -> torch.Tensor:
    return prompt()["input_ids"][:1]  # eager attention makes NaN of padding in float64


# What graph rows do not reach


class Forgetful(modeling_llama.LlamaAttention):
    """A layer of a subclass that hands nothing on."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, cache=None, past_key_values=None, **_):
        return super().forward(hidden_states, position_embeddings, attention_mask, cache or past_key_values)


class Shifted(nn.Module):
    """Half of every token is its predecessor's."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states):
        before = nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return self.inner((hidden_states + before) / 2)


class Quantised(nn.Linear):
    """int8 activations with one scale for all rows, or one for each."""

    each = False

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True) if self.each else x.abs().max()
        scale = scale.clamp(min=1e-9) / 127
        return nn.functional.linear((x / scale).round() * scale, self.weight)


class QuantisedByRow(Quantised):
    each = True


def changed(change, **config):
    model = llama(**config)
    change(model.model.layers[1], model)
    return model


def of_class(kind):
    """MLPs whose products are of this class."""

    def change(layer, model):
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).__class__ = kind

    return change


def by_place(layer, model):
    rotary = model.model.rotary_emb
    own = type(rotary).forward
    rotary.forward = lambda x, position_ids: own(rotary, x, torch.arange(x.shape[1])[None])


def stretched():
    model = SUBJECTS["longrope"].made(None).target
    rotary, own = model.model.rotary_emb, type(model.model.rotary_emb)

    def forward(self, x, position_ids):
        return tuple(position_ids.max() * part for part in own.forward(self, x, position_ids))

    rotary.__class__ = type("Stretched", (own,), {"forward": forward})
    return model


REFUSED = {
    "keys in one layer": (
        lambda: changed(lambda layer, _: setattr(layer.self_attn, "layer_idx", 0)),
        "several attention calls in layer 0",
    ),
    "keywords that its attention does not get": (
        lambda: tiny_configs.build("NemotronForCausalLM"),
        "attention interface",
    ),
    "one layer of many": (
        lambda: changed(lambda layer, _: setattr(layer.self_attn, "__class__", Forgetful), num_hidden_layers=3),
        "2 of 3 attention calls",
    ),
    "a mask of its own": (lambda: tiny_configs.build("DogeForCausalLM"), "mask of its own"),
    "a window of the cache alone": (lambda: llama(sliding_window=5), "cache that keeps 5 tokens"),
    "attention ahead": (
        lambda: changed(lambda layer, _: setattr(layer.self_attn, "is_causal", False)),
        "is_causal=False",
    ),
    "positions by place": (lambda: changed(by_place), "position_ids"),
    "tokens that mix": (
        lambda: changed(lambda layer, _: setattr(layer, "mlp", Shifted(layer.mlp))),
        "than by attention",
    ),
    "a scale for all rows": (lambda: changed(of_class(Quantised)), "quantised over all rows of a forward.*mlp"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_rows_do_not_reach_is_refused_at_every_door(what):
    make, words = REFUSED[what]
    refused(make(), words)


@pytest.mark.parametrize("make", [lambda: changed(of_class(QuantisedByRow)), lambda: llama().train()])
def test_what_is_special_and_served(make):
    model = make()
    draft = {"assistant_model": models.noised(model, 0.01), "graph_config": "tree", "return_dict_in_generate": True}
    out = gsd.generate(model, **prompt(), **TOKENS, **draft)
    assert torch.equal(out.sequences, model.generate(**prompt(), **TOKENS))
    assert out.stats.tokens_per_step > 1


CALLED = {
    "sides of other lengths": (stretched, "more than their frequencies"),
    "a rope that depends on the length": (
        lambda: llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "^model: rope type 'dynamic'",
    ),
    "gradient checkpointing": (
        lambda: changed(lambda _, model: model.train().gradient_checkpointing_enable()),
        r"LlamaForCausalLM is in training mode with gradient checkpointing.*eval\(\)",
    ),
    "an attention that nobody knows": (
        lambda: changed(lambda _, model: setattr(model.config, "_attn_implementation", "flash_of_genius")),
        "flash_of_genius",
    ),
}


@pytest.mark.parametrize("what", CALLED)
def test_settings_that_are_not_served_are_named_and_stay(what):
    make, words = CALLED[what]
    model = make()
    before = model.training, model.is_gradient_checkpointing, model.config._attn_implementation
    with pytest.raises(ValueError, match=words):
        gsd.generate(model, unpadded(), **TOKENS)
    assert before == (model.training, model.is_gradient_checkpointing, model.config._attn_implementation)


def test_heads_that_ranks_do_not_share():
    with pytest.raises(ValueError, match="4 does not divide among"):
        check_heads("model", llama(num_attention_heads=4).config, 3)


# What is remembered


def test_a_model_is_examined_once_and_again_when_it_changes():
    model, forwards, first = llama(attention_dropout=0.1).train(), [], 0
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    state = torch.get_rng_state()
    for _ in range(3):
        with gsd.patch(model):
            first = first or len(forwards)
    assert len(forwards) == first and torch.equal(state, torch.get_rng_state())
    changes = [
        lambda: model.model.layers.append(copy.deepcopy(model.model.layers[0])),
        lambda: setattr(model.config, "rms_norm_eps", 1e-5),
        lambda: setattr(model.model.layers[0].self_attn, "is_causal", False),
        lambda: setattr(model.model.layers[0], "mlp", copy.deepcopy(model.model.layers[0].mlp)),
    ]
    for expected, change in enumerate(changes, first + 1):
        change()
        probe.examine(model)
        probe.examine(model)
        assert len(forwards) == expected


def test_a_passing_error_is_not_remembered():
    model = llama()

    def fail(*_):
        raise MemoryError("full")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match=r"model: LlamaForCausalLM cannot be forwarded .*full") as refusal:
        gsd.patch(model)
    assert isinstance(refusal.value.__cause__, MemoryError)
    handle.remove()
    with pytest.MonkeyPatch.context() as patched:  # the same structure, then: the first found is asked for again
        patched.setattr(Facts.structure, "func", lambda facts: "one")
        handle = model.model.layers[1].register_forward_pre_hook(fail)
        assert probe.examine(model).problem is not None
        handle.remove()
        assert probe.examine(model).problem is None


# While it generates, and what a patch leaves alone


def test_a_change_within_a_forward_is_noticed():
    """As another thread would make it."""
    model, calls, generating = llama(), [], []

    def change(*_):
        calls.extend(generating)
        if len(calls) == 6:
            model.set_attn_implementation("eager")

    model.model.layers[0].register_forward_hook(change)
    gsd.patch(model, draft_sources=("history",), graph_config="tree")  # which looks at what the hook does
    generating.append(1)
    with pytest.raises(RuntimeError, match=r"model: .*changed while it generated"):
        model.generate(unpadded(), **TOKENS)


def test_copies_made_while_a_model_generates(tmp_path):
    """They are of the model alone, and load where this package is not."""
    model, copies = llama(), []

    def keep(*_):
        buffer = io.BytesIO()
        torch.save(model, buffer)
        copies[:] = [copy.deepcopy(model), buffer]
        model.save_pretrained(tmp_path)
        return False

    gsd.patch(model, assistant_model=models.noised(model), graph_config="tree")
    out = model.generate(unpadded(), stopping_criteria=[keep], **TOKENS)
    copies[1].seek(0)
    assert b"gsd_kernels" not in copies[1].getvalue() and "gsd" not in (tmp_path / "config.json").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    for clone in (copies[0], torch.load(copies[1], weights_only=False), loaded):
        assert clone.config._attn_implementation == "sdpa"
        assert torch.equal(clone.generate(unpadded(), **TOKENS), out)


# Weights that hold NaN or infinite numbers: named, or as transformers has it; never a text like any other


IDS = torch.tensor([[5, 7, 9, 11]])
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
CALL = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
GRAPH = {"graph_config": "tree", "draft_sources": ("history",)}


def qwen2(dtype=torch.float32):
    return models.tiny("qwen2", dtype=dtype)  # which has biases


def gpt2(dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=64)
    model = transformers.GPT2LMHeadModel(config).eval().to(dtype)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def spoil(model, path, index, value):
    with torch.no_grad():
        model.get_parameter(path)[index] = value
    return model


AT = "model.layers.1"
WEIGHTS = {
    "a key": (qwen2, f"{AT}.self_attn.k_proj.weight", (3, 5)),
    "a value": (qwen2, f"{AT}.self_attn.v_proj.weight", (0, 0)),
    "a norm": (qwen2, f"{AT}.input_layernorm.weight", 2),
    "an MLP": (qwen2, f"{AT}.mlp.down_proj.weight", (3, 3)),
    "GPT-2's keys": (gpt2, "transformer.h.1.attn.c_attn.bias", 40),
}


@pytest.mark.parametrize(("name", "value", "dtype"), rotated(WEIGHTS, (math.nan, math.inf), DTYPES), ids=str)
def test_a_weight_that_all_tokens_go_through_is_named(name, dtype, value):
    """In a patched model as well; nothing is looked through before logits are NaN."""
    make, path, index = WEIGHTS[name]
    model = spoil(make(dtype), path, index, value)
    gsd.patch(model, **GRAPH)
    for ids, options in ((IDS, {}), (IDS[:, :1], {}), (IDS, {"graph_config": "plain"})):
        with pytest.raises(ValueError, match=f"^logits: NaN, since {path} of the model holds NaN"):
            model.generate(ids, **CALL, **options)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (lambda model: model.model.layers[1].self_attn.v_proj, r"model\.layers\.1\.self_attn\.v_proj\.packed"),
        (lambda model: model.get_input_embeddings(), "the embedding of token 7"),
    ],
)
def test_a_packed_weight_is_named(where, words):
    model = gsd.pack(models.tiny(dtype=torch.float32, hidden_size=64, intermediate_size=96), "q4_0")
    where(model).packed[7, :2] = torch.tensor([math.inf], dtype=torch.float16).view(torch.uint8)
    with pytest.raises(ValueError, match=f"^logits: NaN, since {words} "):
        gsd.generate(model, IDS, **CALL)


@pytest.mark.parametrize(
    ("make", "dtype", "value"), [(qwen2, torch.bfloat16, math.nan), (gpt2, torch.float32, -math.inf)]
)
def test_an_embedding(make, dtype, value):
    """A token of prompt or text is named."""
    plain = make(dtype)
    path = next(name for name, p in plain.named_parameters() if p is plain.get_input_embeddings().weight)
    out = gsd.generate(plain, IDS, **CALL, **GRAPH, return_dict_in_generate=True)
    text = out.sequences[0].tolist()
    for token in (7, 11, next(token for token in text[4:-1] if token not in text[:4])):
        model = spoil(copy.deepcopy(plain), path, token, value)
        for options in ({}, {"logits_processor": [lambda ids, scores: scores]}):
            with pytest.raises(ValueError, match=f"^logits: NaN, since the embedding of token {token} "):
                gsd.generate(model, IDS, **CALL, **GRAPH, **options)


@pytest.mark.parametrize(
    ("make", "layer", "fused", "dtype"),
    [
        (qwen2, f"{AT}.self_attn.k_proj", True, torch.float16),
        (qwen2, "model.layers.0.mlp.down_proj", False, torch.float32),
        (gpt2, "transformer.h.1.attn.c_attn", False, torch.bfloat16),
    ],
)
def test_numbers_that_overflow_name_their_layer(make, layer, fused, dtype, monkeypatch):
    """From finite weights: in a prompt, in one that is behind padding, and at the first row of a graph."""
    monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", str(int(fused)))
    model = spoil(make(dtype), f"{layer}.weight", slice(-3, None), torch.finfo(dtype).max)
    padded, mask = torch.tensor([[0, 0, 5, 7], [3, 5, 7, 9]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    for ids, options in ((IDS, GRAPH), (IDS[:, :1], {}), (padded, GRAPH | {"attention_mask": mask})):
        with pytest.raises(ValueError, match=f"^logits: NaN, since {layer} computes NaN"):
            gsd.generate(model, ids, **CALL, **options)


@pytest.mark.parametrize("fused", [True, False], ids=["operator", "modules"])
def test_a_token_that_overflows_is_none_of_the_others_business(fused, monkeypatch):
    """Drafted rows, other texts of a batch and, to the operator, padding may hold it; a prompt may not, wherever."""
    monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", str(int(fused)))
    model, name = qwen2(), "model.layers.0.self_attn.v_proj"
    with torch.no_grad():  # values overflow at token 40 alone
        embedded, weight = model.get_input_embeddings().weight, model.get_parameter(f"{name}.weight")
        embedded[:, 0], embedded[40], embedded[40, 0] = 0.0, 0.0, 1.0
        weight[2:4], weight[2:4, 0] = 0.0, torch.finfo(torch.float32).max
    expected = type(model).generate(model, IDS, **CALL)
    assert 40 not in expected[0].tolist()
    if fused:  # transformers' attention lets masked keys that are not finite through, in the modules too
        padded, mask = torch.tensor([[40, 40, *IDS[0].tolist()]]), torch.tensor([[0, 0, 1, 1, 1, 1]])
        assert torch.equal(gsd.generate(model, padded, attention_mask=mask, **CALL, **GRAPH)[:, 2:], expected)
    drafted = torch.tensor([token for pair in zip(expected[0].tolist(), [40] * 99, strict=False) for token in pair])
    assert torch.equal(gsd.generate(model, IDS, **CALL, **GRAPH, reference_ids=drafted), expected)
    invalid = CALL | {"remove_invalid_values": True}
    for at in (0, 3):
        ids = IDS.clone()
        ids[0, at] = 40
        with pytest.raises(ValueError, match=rf"^logits: NaN, since {name} "):
            gsd.generate(model, ids, **CALL, **GRAPH)
        both = torch.cat([ids, IDS])
        own = type(model).generate(model, both, **invalid)
        assert torch.equal(own[1:], expected)
        if not own[0, 4:].any():  # else a key of −∞ was left out
            assert torch.equal(gsd.generate(model, both, **invalid, **GRAPH), own)
