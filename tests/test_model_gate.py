"""The gate before models: what they do with graph rows is proved once, and followed or refused by name."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import subprocess
import sys
import weakref

import model_sweep
import models
import pytest
import tiny_configs
import torch
import transformers
from torch import nn
from transformers.models.llama import modeling_llama

import gsd_kernels as gsd
from gsd_kernels_hf.model import probe

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


class Streamer(transformers.generation.streamers.BaseStreamer):
    def put(self, value):
        raise AssertionError("nothing is streamed")

    end = put


def refused(model, match: str) -> None:
    """Each way to a model is closed, before anything happens."""
    name = type(model).__name__
    ids = prompt()["input_ids"][:1]
    call = {"graph_config": "tree", "draft_sources": ("history",), "streamer": Streamer()}
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


def exact(model, expected: torch.Tensor | None = None, **options) -> None:
    """Greedy text with a noised draft is the model's own."""
    tokens = {**TOKENS, **options}
    expected = model.generate(**prompt(), **tokens) if expected is None else expected
    out = gsd.generate(
        model,
        **prompt(),
        assistant_model=models.noised(model, 0.01),
        graph_config="tree",
        return_dict_in_generate=True,
        **tokens,
    )
    assert torch.equal(out.sequences, expected)
    assert out.stats.tokens_per_step > 1


# Layers and masks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["StableLmForCausalLM", "NemotronForCausalLM"])
def test_layers_that_keep_unknown_keywords_from_their_attention(name):
    refused(tiny_configs.build(name), "attention interface")


class Forgetful(modeling_llama.LlamaAttention):
    """One layer of a subclass that hands nothing on."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **_):
        return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values)


def test_one_layer_of_many():
    model = llama(num_hidden_layers=3)
    exact(model)
    attention = model.model.layers[1].self_attn
    attention.__class__ = Forgetful
    refused(model, "2 of 3 attention calls")
    attention.__class__ = modeling_llama.LlamaAttention
    exact(model)


def test_a_mask_of_the_models_own():
    refused(tiny_configs.build("DogeForCausalLM"), "mask of its own")


@pytest.mark.parametrize("name", ["PhimoeForCausalLM", "Qwen2MoeForCausalLM"])
def test_a_window_that_only_the_mask_has_is_followed(name):
    model = tiny_configs.build(name)
    assert tiny_configs.WINDOW in probe.examine(model).windows
    plain = model.generate(**prompt(), **TOKENS)
    model.config.sliding_window = 1000
    assert not torch.equal(model.generate(**prompt(), **TOKENS), plain), "the window must matter"
    exact(tiny_configs.build(name), plain)


def test_a_window_that_only_the_cache_has():
    refused(llama(sliding_window=5), "cache that keeps 5 tokens")
    refused(tiny_configs.build("MoshiForCausalLM"), "cache that keeps 5 tokens")


def test_windows_of_mask_functions():
    from transformers import masking_utils as masks

    assert probe.window_of(masks.causal_mask_function) is None
    for window in (1, 2, 5, 4096, 131072):
        assert probe.window_of(masks.sliding_window_causal_mask_function(window)) == window
    for other in (
        masks.bidirectional_mask_function,
        masks.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)),
        masks.sliding_window_bidirectional_mask_function(5),
        lambda b, h, q, k: torch.ones(3, dtype=torch.bool)[q],
        lambda b, h, q, k: (k <= q) & (k % 2 == 0),
    ):
        with pytest.raises(probe.Unserved):
            probe.window_of(other)


def test_attention_that_is_not_causal():
    refused(llama(is_causal=False), "not causal")
    model = llama()
    model.model.layers[1].self_attn.is_causal = False
    refused(model, "is_causal=False")
    text = {**tiny_configs.shrunk(transformers.Gemma4TextConfig, 2), "use_bidirectional_attention": "all"}
    gemma = tiny_configs.build("Gemma4ForConditionalGeneration", text_config=text)
    with unchanged(gemma), pytest.raises(ValueError, match=r"Gemma4ForConditionalGeneration.*(causal|mask)"):
        gsd.generate(gemma, **prompt(), draft_sources=("history",), graph_config="tree", **TOKENS)


def test_a_temperature_by_place_in_the_cache():
    """Llama 4 with full attention in all layers scales queries by the cache's length."""
    fields = tiny_configs.shrunk(transformers.Llama4TextConfig, 2)
    config = transformers.Llama4TextConfig(
        **{**fields, "layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 0], "attn_temperature_tuning": True}
        | {"floor_scale": 4}
    )
    model = transformers.Llama4ForCausalLM(config).eval()
    refused(model.double(), "(place|length)")


def test_positions_by_place_in_the_cache():
    model = llama()
    rotary = model.model.rotary_emb
    own = type(rotary).forward

    def by_place(x, position_ids):
        return own(rotary, x, torch.arange(x.shape[1])[None])

    rotary.forward = by_place
    refused(model, "position_ids")


class Shifted(nn.Module):
    """Half of every token is its predecessor's."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states):
        before = nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return self.inner((hidden_states + before) / 2)


def test_tokens_that_mix_outside_attention():
    model = llama()
    model.model.layers[0].mlp = Shifted(model.model.layers[0].mlp)
    refused(model, "otherwise than by attention")


# What is remembered --------------------------------------------------------------------------------------------------


def test_a_model_is_examined_once_and_again_when_it_changes():
    model, forwards = llama(), []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    for _ in range(3):
        gsd.patch(model)
        gsd.unpatch(model)
    assert len(forwards) == 1
    changes = [
        lambda: model.model.layers.append(copy.deepcopy(model.model.layers[0])),
        lambda: setattr(model.config, "rms_norm_eps", 1e-5),
        lambda: setattr(model.model.layers[0].self_attn, "is_causal", False),
        lambda: model.set_attn_implementation("eager"),
        lambda: setattr(model.model.layers[0], "mlp", copy.deepcopy(model.model.layers[0].mlp)),
    ]
    for expected, change in enumerate(changes, 2):
        change()
        probe.examine(model)
        probe.examine(model)
        assert len(forwards) == expected


def test_what_is_remembered_dies_with_the_model():
    model = llama()
    probe.examine(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_examining_leaves_random_numbers_alone():
    model = llama(attention_dropout=0.1).train()
    state = torch.get_rng_state()
    probe.examine(model)
    assert torch.equal(state, torch.get_rng_state())


# The attention implementation ----------------------------------------------------------------------------------------

WAYS = {
    "model": lambda model: model.set_attn_implementation("eager"),
    "inner model": lambda model: model.model.set_attn_implementation("eager"),
    "config": lambda model: setattr(model.config, "_attn_implementation", "eager"),
}


@functools.lru_cache
def unpadded() -> torch.Tensor:
    return prompt()["input_ids"][:1]  # eager attention makes NaN of padding in float64


@pytest.mark.parametrize("way", WAYS)
def test_another_attention_implementation_after_patch(way):
    model = llama()
    draft, expected = models.noised(model, 0.01), model.generate(unpadded(), **TOKENS)
    handle = gsd.patch(model, assistant_model=draft, graph_config="tree")
    WAYS[way](model)
    assert torch.equal(model.generate(unpadded(), **TOKENS), expected)
    assert handle.stats.tokens_per_step > 1 and model.config._attn_implementation == "eager"
    gsd.unpatch(model)
    assert model.config._attn_implementation == "eager", "it is the user's"
    assert torch.equal(model.generate(unpadded(), **TOKENS), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("patched", [True, False])
def test_another_attention_implementation_in_a_callback(way, patched):
    model = llama()
    draft, expected = models.noised(model, 0.01), model.generate(unpadded(), **TOKENS)

    def change(*_):
        WAYS[way](model)
        with torch.no_grad():  # a callback may use the model as it is
            assert model(input_ids=unpadded(), output_attentions=True).attentions[0] is not None
        return False

    options = {"assistant_model": draft, "graph_config": "tree", "stopping_criteria": [change], **TOKENS}
    if patched:
        gsd.patch(model)
        out = model.generate(unpadded(), **options)
    else:
        out = gsd.generate(model, unpadded(), **options)
    assert torch.equal(out, expected) and model.config._attn_implementation == "eager"


def test_a_change_within_a_forward_is_noticed():
    """As another thread would make it."""
    model, calls = llama(), []

    def change(*_):
        calls.append(1)
        if len(calls) == 6:
            model.set_attn_implementation("eager")

    model.model.layers[0].register_forward_hook(change)
    with pytest.raises(RuntimeError, match=r"model: .*changed while it generated"):
        gsd.generate(model, unpadded(), draft_sources=("history",), graph_config="tree", **TOKENS)


def test_an_unknown_attention_implementation_is_refused():
    model = llama()
    model.config._attn_implementation = "flash_of_genius"
    with pytest.raises(ValueError, match="flash_of_genius"):
        gsd.generate(model, unpadded(), **TOKENS)
    assert model.config._attn_implementation == "flash_of_genius"


# Dynamic quantisation of activations ---------------------------------------------------------------------------------


class Quantised(nn.Linear):
    """int8 activations with one scale for all rows, or one for each."""

    each = False

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True) if self.each else x.abs().max()
        scale = scale.clamp(min=1e-9) / 127
        return nn.functional.linear((x / scale).round() * scale, self.weight)


class QuantisedByRow(Quantised):
    each = True


def quantise(model, kind) -> None:
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).__class__ = kind


def test_activations_quantised_over_all_rows():
    model = llama()
    quantise(model, Quantised)
    refused(model, "quantised over all rows of a forward.*mlp")
    quantise(model, QuantisedByRow)
    exact(model)


def test_scales_over_all_rows_in_any_module():
    class Scaled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            scale = x.abs().max()
            return self.inner((x / scale * 127).round() / 127 * scale)

    model = llama()
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp)
    refused(model, "otherwise than by attention")


@pytest.mark.filterwarnings("ignore")
def test_dynamic_quantisation_of_torch():
    quantization = pytest.importorskip("torch.ao.quantization")
    if not hasattr(quantization, "quantize_dynamic") or "x86" not in torch.backends.quantized.supported_engines:
        pytest.skip("torch has no dynamic quantisation here")
    model = llama(dtype=torch.float32)
    model.generation_config.eos_token_id = None
    quantised = quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*quantised over all rows"):
        gsd.generate(quantised, **prompt(), draft_sources=("history",), graph_config="tree", **TOKENS)


def test_weights_that_hold_nan_are_not_taken_for_mixing():
    model = llama()
    with torch.no_grad():
        model.lm_head.weight[3, 3] = torch.nan
    assert probe.examine(model).problem is None


# Copies and checkpoints ----------------------------------------------------------------------------------------------

LOADING = """
import sys, torch, transformers
sys.modules["gsd_kernels"] = sys.modules["gsd_kernels_hf"] = None
model = torch.load(sys.argv[1], weights_only=False)
assert model.generate.__func__ is transformers.GenerationMixin.generate
assert model.config._attn_implementation == "sdpa"
ids = torch.load(sys.argv[2])
torch.save(model.generate(ids, max_new_tokens=12, do_sample=False), sys.argv[3])
"""


@pytest.mark.parametrize("when", ["patched", "generating"])
def test_a_saved_model_is_loaded_where_this_package_is_not(when, tmp_path):
    model = llama()
    expected = model.generate(unpadded(), **TOKENS)
    gsd.patch(model, assistant_model=models.noised(model), graph_config="tree")
    paths = [tmp_path / name for name in ("model.pt", "ids.pt", "out.pt")]
    torch.save(unpadded(), paths[1])
    if when == "patched":
        torch.save(model, paths[0])
    else:
        model.generate(unpadded(), **TOKENS, stopping_criteria=[lambda *_: torch.save(model, paths[0]) or False])
    done = subprocess.run([sys.executable, "-c", LOADING, *map(str, paths)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert torch.equal(torch.load(paths[2]), expected)


def test_copies_made_while_a_model_generates(tmp_path):
    model, copies = llama(), []
    draft = models.noised(model)

    def keep(*_):
        buffer = io.BytesIO()
        torch.save(model, buffer)
        copies[:] = [copy.deepcopy(model), buffer]
        model.save_pretrained(tmp_path)
        return False

    out = gsd.generate(
        model, unpadded(), assistant_model=draft, graph_config="tree", stopping_criteria=[keep], **TOKENS
    )
    copies[1].seek(0)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    for clone in (copies[0], torch.load(copies[1], weights_only=False), loaded):
        assert clone.config._attn_implementation == "sdpa"
        assert torch.equal(clone.generate(unpadded(), **TOKENS), out)


# Caches --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Gemma3nForCausalLM", "Gemma4ForCausalLM", "MllamaForCausalLM"])
def test_layers_without_keys_of_their_own(name):
    """They share those of others, or never run; as target and as draft."""
    model = tiny_configs.build(name)
    exact(model)
    draft = models.noised(model, 0.01)
    target = llama(vocab_size=tiny_configs.VOCAB)
    expected = target.generate(**prompt(), **TOKENS)
    assert torch.equal(gsd.generate(target, **prompt(), assistant_model=draft, graph_config="tree", **TOKENS), expected)


def test_fewer_layers_than_the_config_says():
    model = llama(num_hidden_layers=4)
    model.model.layers = model.model.layers[:2]
    exact(model)


def test_training_mode():
    model = llama().train()
    exact(model)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is in training mode with gradient checkpointing.*eval\(\)"):
        gsd.generate(model, **prompt(), **TOKENS)
    assert model.training and model.is_gradient_checkpointing
    exact(model.eval())


# Features that a patch leaves alone ----------------------------------------------------------------------------------


def test_attention_weights_of_a_patched_model():
    model = llama(dtype=torch.float32)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**prompt(), output_attentions=True).attentions
        gsd.patch(model)
        model.generate(**prompt(), **TOKENS)
        model.config.output_attentions = True
        given = model(**prompt()).attentions
    assert len(given) == 2 and all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


def test_continuous_batching_of_a_patched_model():
    """It asks the config for an attention implementation that it knows."""
    manager = getattr(transformers, "ContinuousBatchingManager", None)
    if not hasattr(manager, "switch_to_cb_friendly_attn"):
        pytest.skip("this transformers has no such check")
    model = llama(dtype=torch.float32)
    gsd.patch(model)
    manager.switch_to_cb_friendly_attn(manager.__new__(manager), model, auto_switch_to_flash=False)
    assert model.config._attn_implementation == "sdpa"
