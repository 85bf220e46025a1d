"""What models are served exactly, or refused by name: layers, masks, windows, configs, weights that are not finite."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import math
import subprocess
import sys
import weakref

import models
import pytest
import tiny_configs
import torch
import transformers
from gates import TOKENS, exact, llama, prompt, refused, unchanged, unpadded
from models import rotated
from torch import nn
from transformers.models.llama import modeling_llama

import gsd_kernels as gsd
from gsd_kernels_hf.model import probe
from gsd_kernels_hf.model.facts import Facts
from gsd_kernels_hf.model.masks import Limits, Unserved, limits_of
from gsd_kernels_hf.model.recurrent import mixers

# Models that graph rows do not reach, quantised, copied or with features of their own: exact, or refused by name.


torch.set_num_threads(1)


# Layers and masks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["StableLmForCausalLM", "NemotronForCausalLM"])
def test_layers_that_keep_unknown_keywords_from_their_attention(name):
    try:
        model = tiny_configs.build(name)
    except tiny_configs.Unbuildable as error:
        pytest.skip(f"this transformers cannot build it: {error}")
    refused(model, "attention interface")


class Forgetful(modeling_llama.LlamaAttention):
    """One layer of a subclass that hands nothing on."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, cache=None, past_key_values=None, **_):
        return super().forward(hidden_states, position_embeddings, attention_mask, cache or past_key_values)


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
    assert tiny_configs.WINDOW in [kind.window for kind in probe.examine(model).kinds]
    plain = model.generate(**prompt(), **TOKENS)
    model.config.sliding_window = 1000
    assert not torch.equal(model.generate(**prompt(), **TOKENS), plain), "the window must matter"
    exact(tiny_configs.build(name), plain)


def test_a_window_that_only_the_cache_has():
    refused(llama(sliding_window=5), "cache that keeps 5 tokens")
    # In transformers 5.0 for another reason.
    refused(tiny_configs.build("MoshiForCausalLM"), "(cache that keeps 5 tokens|attention interface)")


def test_windows_and_chunks_of_mask_functions():
    from transformers import masking_utils as masks

    padding = torch.tensor([0, 5])
    assert limits_of(masks.causal_mask_function, padding.tolist()) == Limits()
    for window in (1, 2, 5, 4096, 131072):
        assert limits_of(masks.sliding_window_causal_mask_function(window), padding.tolist()) == Limits(window)
    for chunk in (2, 5, 8, 4096, 131072):
        assert limits_of(masks.chunked_causal_mask_function(chunk, padding), padding.tolist()) == Limits(chunk=chunk)
    for other in (
        masks.bidirectional_mask_function,
        masks.chunked_causal_mask_function(8, torch.tensor([0, 0])),  # from the first column, padding or not
        masks.and_masks(masks.chunked_causal_mask_function(8, padding), masks.sliding_window_causal_mask_function(5)),
        *([both(5)] if (both := getattr(masks, "sliding_window_bidirectional_mask_function", None)) else []),
        lambda b, h, q, k: torch.ones(3, dtype=torch.bool)[q],
        lambda b, h, q, k: (k <= q) & (k % 2 == 0),
    ):
        with pytest.raises(Unserved):
            limits_of(other, padding.tolist())


def test_attention_that_is_not_causal():
    model, ids = llama(is_causal=False), prompt()["input_ids"]
    with torch.no_grad():
        looks_ahead = not torch.equal(model(ids).logits[:, 0], model(ids[:, :4]).logits[:, 0])
    if looks_ahead:  # transformers 5.0 does not know the option
        refused(model, "not causal")
    else:
        exact(model)
    model = llama()
    model.model.layers[1].self_attn.is_causal = False
    refused(model, "is_causal=False")
    if not hasattr(transformers, "Gemma4TextConfig"):
        return
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
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config).eval().double()
    attention = type(model.model.layers[0].self_attn)
    if "get_seq_length" in inspect.getsource(attention):
        exact(model)
    else:  # in transformers 5.0 by cache_position
        refused(model, "length")


def test_positions_by_place_in_the_cache():
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match=r"^model: rope type 'dynamic'"):
        gsd.generate(llama(rope_parameters=dynamic), **prompt(), **TOKENS)
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
    model, forwards, first = llama(), [], 0
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    for _ in range(3):
        gsd.patch(model)
        gsd.unpatch(model)
        first = first or len(forwards)
    assert len(forwards) == first
    changes = [
        lambda: model.model.layers.append(copy.deepcopy(model.model.layers[0])),
        lambda: setattr(model.config, "rms_norm_eps", 1e-5),
        lambda: setattr(model.model.layers[0].self_attn, "is_causal", False),
        lambda: model.set_attn_implementation("eager"),
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
    with pytest.raises(ValueError, match="full"):
        probe.served(model)
    handle.remove()
    with pytest.MonkeyPatch.context() as patched:  # the same structure, then: the first found is asked for again
        patched.setattr(Facts.structure, "func", lambda facts: "one")
        handle = model.model.layers[1].register_forward_pre_hook(fail)
        assert probe.examine(model).problem is not None
        handle.remove()
        assert probe.examine(model).problem is None


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


def test_an_unknown_attention_implementation_is_refused():
    model = llama()
    model.config._attn_implementation = "flash_of_genius"
    with pytest.raises(ValueError, match="flash_of_genius"):
        gsd.generate(model, unpadded(), **TOKENS)
    assert model.config._attn_implementation == "flash_of_genius"


def test_a_release_whose_caches_keep_states_otherwise_is_named(monkeypatch):
    monkeypatch.setattr(mixers, "READABLE", False)
    refused(tiny_configs.build("Lfm2ForCausalLM", 4), r"recurrent state, .* transformers 5.14 or newer; 5")


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
ids = torch.load(sys.argv[1])
for path in sys.argv[2:]:
    model = torch.load(path, weights_only=False)
    assert model.generate.__func__ is transformers.GenerationMixin.generate
    assert model.config._attn_implementation == "sdpa"
    torch.save(model.generate(ids, max_new_tokens=12, do_sample=False), path + ".out")
"""


@pytest.mark.slow
def test_a_saved_model_is_loaded_where_this_package_is_not(tmp_path):
    """Saved while it is patched, and in the middle of a text."""
    model = llama()
    expected = model.generate(unpadded(), **TOKENS)
    gsd.patch(model, assistant_model=models.noised(model), graph_config="tree")
    ids, *paths = (str(tmp_path / name) for name in ("ids.pt", "patched.pt", "generating.pt"))
    torch.save(unpadded(), ids)
    torch.save(model, paths[0])
    model.generate(unpadded(), **TOKENS, stopping_criteria=[lambda *_: torch.save(model, paths[1]) or False])
    done = subprocess.run([sys.executable, "-c", LOADING, ids, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for path in paths:
        assert torch.equal(torch.load(f"{path}.out"), expected)


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
    assert "gsd" not in (tmp_path / "config.json").read_text()
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


# Weights that hold NaN or infinite numbers: named, or as transformers has it; never a text like any other.


IDS = torch.tensor([[5, 7, 9, 11]])
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
CALL = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
GRAPH = {"graph_config": "tree", "draft_sources": ("history",)}


def small_llama(dtype=torch.float32):
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
    "a key": (small_llama, f"{AT}.self_attn.k_proj.weight", (3, 5)),
    "all keys": (small_llama, f"{AT}.self_attn.k_proj.weight", ...),
    "a value": (small_llama, f"{AT}.self_attn.v_proj.weight", (0, 0)),
    "a key's bias": (small_llama, f"{AT}.self_attn.k_proj.bias", 1),
    "a norm": (small_llama, f"{AT}.input_layernorm.weight", 2),
    "an MLP": (small_llama, f"{AT}.mlp.down_proj.weight", (3, 3)),
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
    rotated((small_llama, gpt2), DTYPES, (math.nan, -math.inf)),
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
    "keys": (small_llama, f"{AT}.self_attn.k_proj.weight", f"{AT}.self_attn.k_proj"),
    "values": (small_llama, f"{AT}.self_attn.v_proj.weight", f"{AT}.self_attn.v_proj"),
    "an MLP before keys": (small_llama, "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj"),
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
    model = small_llama(dtype)
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
@pytest.mark.parametrize("make", [small_llama, gpt2], ids=["llama", "gpt2"])
def test_a_token_of_the_text_is_named_as_one_of_the_prompt_is(make, processed):
    model = untied(make())
    text = gsd.generate(model, IDS, **CALL)[0].tolist()
    path = next(name for name, p in model.named_parameters() if p is model.get_input_embeddings().weight)
    token = next(token for token in text[4:-1] if token not in text[:4])
    spoil(model, path, token, math.nan)
    options = {"logits_processor": [lambda ids, scores: scores]} if processed else {}
    with pytest.raises(ValueError, match=f"^logits: NaN, since the embedding of token {token} "):
        gsd.generate(model, IDS, **CALL, **GRAPH, **options)
