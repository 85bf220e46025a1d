"""What is honoured, irrelevant or refused: complete for the installed transformers, named, changing nothing."""

from __future__ import annotations

import functools
import inspect
import logging

import models
import pytest
import torch
import transformers
from transformers import GenerationConfig, GenerationMixin

import gsd_kernels as gsd
from gsd_kernels_hf import validate
from gsd_kernels_hf.validate import options

torch.set_num_threads(1)

# Completeness --------------------------------------------------------------------------------------------------------


def test_every_generation_config_field_is_listed():
    fields = set(vars(GenerationConfig()))
    fields |= {name for name in vars(models.tiny().generation_config) if not name.startswith("_")}
    assert len(fields) > 50
    assert fields - set(options.CONFIG_FIELDS) == set()
    for name, (treatment, why, neutral) in options.CONFIG_FIELDS.items():
        assert treatment in (options.HONOURED, options.IRRELEVANT, options.REFUSED), name
        assert bool(why) == (treatment == options.REFUSED), f"{name}: a refusal says why, nothing else does"
        assert isinstance(neutral, tuple)


def test_defaults_are_accepted():
    validate.check_generation_config(GenerationConfig())
    validate.check_generation_config(models.tiny().generation_config)


def test_every_generate_parameter_is_listed():
    parameters = set(inspect.signature(GenerationMixin.generate).parameters) - {"self"}
    read = set(inspect.signature(GenerationMixin._extract_generation_mode_kwargs).parameters)
    parameters |= read - {"self", "custom_generate", "kwargs"}
    assert parameters - set(options.GENERATE_PARAMETERS) == set()
    assert set(options.GENERATE_PARAMETERS.values()) <= {options.HONOURED, options.IRRELEVANT, options.REFUSED}


def test_an_unknown_option_that_is_set_is_reported(caplog):
    config = GenerationConfig()
    config.invented_option = None
    with caplog.at_level(logging.WARNING, logger="gsd_kernels"):
        validate.check_generation_config(config)
        assert not caplog.records
        config.invented_option = 3
        validate.check_generation_config(config)
    assert "invented_option" in caplog.text


REFUSED_VALUES = {
    "num_beams": 2,
    "num_beam_groups": 2,
    "constraints": [1],
    "force_words_ids": [[1]],
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "guidance_scale": 1.5,
    "prompt_lookup_num_tokens": 4,
    "assistant_early_exit": 1,
    "use_mtp": True,
    "speculation_type": "x",
    "is_assistant": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "token_healing": True,
    "cache_implementation": "quantized",
}


def test_every_refused_field_is_refused_by_name():
    refused = {name for name, (treatment, *_) in options.CONFIG_FIELDS.items() if treatment == options.REFUSED}
    assert refused == set(REFUSED_VALUES)
    for name, value in REFUSED_VALUES.items():
        config = GenerationConfig(return_dict_in_generate=True)
        setattr(config, name, value)
        with pytest.raises(ValueError, match=name):
            validate.check_generation_config(config)


# Bad input -----------------------------------------------------------------------------------------------------------


@functools.lru_cache
def pair():
    target = models.tiny(dtype=torch.float32, max_position_embeddings=64)
    return target, models.noised(target)


def changed(**config):
    return models.tiny(dtype=torch.float32, **config)


def with_nan():
    model = models.tiny(dtype=torch.float32)
    model.model.layers[1].mlp.down_proj.weight.data.fill_(float("nan"))
    return model


def small(name: str, **config):
    """A tiny model of another family."""
    base = {"vocab_size": models.VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    made = getattr(transformers, f"{name}Config")(**{**base, **config})
    cls = "ForConditionalGeneration" if name == "T5" else "ForCausalLM"
    return getattr(transformers, f"{name}{cls}")(made).eval()


def sinks():
    """Under an attention that drops them."""
    model = small(
        "GptOss",
        intermediate_size=32,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    model.config._attn_implementation = "sdpa"
    return model


def tokenizer(more: int = 0):
    tokenizer = models.tokenizer()
    tokenizer.add_tokens([f"<{i}>" for i in range(more)])
    return tokenizer


IDS = torch.randint(3, models.VOCAB, (2, 10), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)


def masked(*zeros: tuple[int, int]) -> torch.Tensor:
    mask = MASK.clone()
    for at in zeros:
        mask[at] = 0
    return mask


def filled_cache():
    cache = transformers.DynamicCache()
    pair()[0](IDS, past_key_values=cache, use_cache=True)
    return cache


HIDDEN_STATES = {"output_hidden_states": True, "return_dict_in_generate": True}
# name, what the message names, error, arguments of gsd_kernels.generate beside a good prompt
BAD_INPUT = [
    ("NaN in the target's weights", "logits", ValueError, lambda: {"model": with_nan()}),
    ("another vocabulary", "assistant_model", ValueError, lambda: {"assistant_model": changed(vocab_size=4000)}),
    ("another eos token", "assistant_model", ValueError, lambda: {"assistant_model": changed(eos_token_id=50)}),
    (
        "a tokenizer of another model",
        "assistant_tokenizer: its largest id is 99, and the draft model has 97 tokens",
        ValueError,
        lambda: {"tokenizer": tokenizer(), "assistant_tokenizer": tokenizer(3)},
    ),
    ("ALiBi", "model: BloomForCausalLM", ValueError, lambda: {"model": small("Bloom")}),
    ("a draft of no use", "assistant_model: Bloom", ValueError, lambda: {"assistant_model": small("Bloom")}),
    ("encoder and decoder", "model: T5", ValueError, lambda: {"model": small("T5", d_model=32, d_kv=8, d_ff=32)}),
    ("attention sinks dropped", "with sinks.*'eager'", ValueError, lambda: {"model": sinks()}),
    (
        "dynamic rope",
        "rope type 'dynamic'",
        ValueError,
        lambda: {"model": changed(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})},
    ),
    ("not a model", "model: expected", TypeError, lambda: {"model": torch.nn.Linear(2, 2)}),
    ("a path for a draft", "assistant_model: expected", TypeError, lambda: {"assistant_model": "gpt2"}),
    ("right padding", "attention_mask.*left", ValueError, lambda: {"attention_mask": masked((1, 9))}),
    ("a hole", "attention_mask.*hole", ValueError, lambda: {"attention_mask": masked((0, 4))}),
    ("an empty prompt", "attention_mask", ValueError, lambda: {"attention_mask": MASK * torch.tensor([[1], [0]])}),
    ("a mask of another shape", "attention_mask", ValueError, lambda: {"attention_mask": MASK[:, :7]}),
    ("ids beyond the vocabulary", "input_ids", ValueError, lambda: {"inputs": IDS + 60}),
    ("negative ids", "input_ids", ValueError, lambda: {"inputs": IDS - 60}),
    ("float ids", "input_ids", TypeError, lambda: {"inputs": IDS.float()}),
    ("a list of ids", "input_ids", TypeError, lambda: {"inputs": IDS.tolist()}),
    ("no tokens", "input_ids", ValueError, lambda: {"inputs": IDS[:, :0], "attention_mask": MASK[:, :0]}),
    ("a filled cache", "past_key_values", ValueError, lambda: {"past_key_values": filled_cache()}),
    ("embeddings", "inputs_embeds", ValueError, lambda: {"inputs_embeds": torch.zeros(2, 10, 32)}),
    ("positions", "position_ids", ValueError, lambda: {"position_ids": MASK}),
    ("beams", "num_beams", ValueError, lambda: {"num_beams": 3}),
    ("contrastive search", "penalty_alpha", ValueError, lambda: {"penalty_alpha": 0.6, "top_k": 4}),
    ("classifier-free guidance", "guidance_scale", ValueError, lambda: {"guidance_scale": 2.0}),
    ("a quantised cache", "cache_implementation", ValueError, lambda: {"cache_implementation": "quantized"}),
    ("prompt lookup", "prompt_lookup_num_tokens", ValueError, lambda: {"prompt_lookup_num_tokens": 3}),
    ("hidden states", "output_hidden_states", ValueError, lambda: HIDDEN_STATES),
    ("no new tokens", "max_new_tokens|max_length", ValueError, lambda: {"max_new_tokens": 0}),
    ("max_length below the prompt", "max_length", ValueError, lambda: {"max_length": 5, "max_new_tokens": None}),
    ("a word for a seed", "seed", TypeError, lambda: {"seed": "7", "do_sample": True}),
    ("true for a seed", "seed", TypeError, lambda: {"seed": True}),
    ("a seed of 65 bits", "seed", ValueError, lambda: {"seed": 2**64}),
    ("an unknown preset", "graph_config", ValueError, lambda: {"graph_config": "forest"}),
    ("a dictionary for a graph", "graph_config", TypeError, lambda: {"graph_config": {"depth": 3}}),
    ("an unknown backend", "backend", ValueError, lambda: {"backend": "tpu"}),
    ("stop strings without a tokenizer", "stop_strings", ValueError, lambda: {"stop_strings": ["x"]}),
    ("an invented argument", "depth", ValueError, lambda: {"depth": 4}),
    ("history and a draft", "draft_sources", ValueError, lambda: {"draft_sources": ("history",)}),
    ("an unknown source", "draft_sources", ValueError, lambda: {"draft_sources": ("oracle",)}),
]


@pytest.mark.parametrize(("what", "names", "error", "arguments"), BAD_INPUT, ids=[case[0] for case in BAD_INPUT])
def test_bad_input_is_named_and_changes_nothing(what, names, error, arguments):
    good_target, good_draft = pair()
    call = {"inputs": IDS, "assistant_model": good_draft, "max_new_tokens": 8, "do_sample": False}
    call = {"model": good_target, "graph_config": "tree", **call, **arguments()}
    watched = [m for m in (call["model"], call["assistant_model"]) if isinstance(m, transformers.PreTrainedModel)]
    ids = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if call["model"].__class__.__name__[:2] == "T5" else {})

    def outputs():
        with torch.no_grad():
            return [m(**(ids if m is call["model"] else {"input_ids": IDS})).logits for m in watched]

    implementations = [m.config._attn_implementation for m in watched]
    before = outputs()
    with pytest.raises(error, match=names):
        gsd.generate(call.pop("model"), call.pop("inputs"), **call)
    call["model"] = watched[0] if watched else None
    assert [m.config._attn_implementation for m in watched] == implementations
    assert all("generate" not in vars(m) for m in watched)
    for a, b in zip(before, outputs(), strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def test_the_good_call_of_the_table_is_good():
    target, draft = pair()
    out = gsd.generate(target, IDS, assistant_model=draft, max_new_tokens=8, do_sample=False, graph_config="tree")
    assert torch.equal(out, target.generate(IDS, max_new_tokens=8, do_sample=False))


def test_patching_twice_and_unpatching_the_unpatched():
    target, draft = pair()
    with pytest.raises(ValueError, match="model: not patched"):
        gsd.unpatch(target)
    gsd.patch(target, assistant_model=draft)
    try:
        with pytest.raises(ValueError, match="model: already patched"):
            gsd.patch(target, assistant_model=draft)
        assert target.generate is vars(target)["generate"] and target.config._attn_implementation == "sdpa"
    finally:
        gsd.unpatch(target)
    with pytest.raises(ValueError, match="model: not patched"):
        gsd.unpatch(target)
    with pytest.raises(ValueError, match="model: not patched"):
        gsd.unpatch("model")
    assert target.config._attn_implementation == draft.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("arguments", [{"graph_config": "forest"}, {"assistant_model": "x"}, {"backend": "tpu"}])
def test_a_bad_patch_changes_nothing(arguments):
    target, draft = pair()
    with pytest.raises((ValueError, TypeError), match=next(iter(arguments))):
        gsd.patch(target, **{"assistant_model": draft, **arguments})
    assert "generate" not in vars(target) and target.config._attn_implementation == "sdpa"


def test_a_model_outside_the_attention_interface_is_refused():
    """Its own attention would silently ignore the graph."""
    model = models.tiny(dtype=torch.float32)
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states.cumsum(1), None)
    with pytest.raises(ValueError, match=r"model: LlamaForCausalLM lets .* otherwise than by attention"):
        gsd.generate(model, IDS, max_new_tokens=4)
    assert model.config._attn_implementation == "sdpa"


def test_stop_strings_of_the_models_own_generation_config():
    target = models.tiny(dtype=torch.float64)
    prompt = models.prompts(1, 8)["input_ids"]
    text = models.tokenizer().decode(target.generate(prompt, max_new_tokens=8, do_sample=False)[0, 8:])
    target.generation_config.stop_strings = [text[3]]
    shared = {"tokenizer": models.tokenizer(), "max_new_tokens": 8, "do_sample": False}
    expected = target.generate(prompt, **shared)
    assert expected.shape[1] < 16
    assert torch.equal(gsd.generate(target, prompt, assistant_model=target, graph_config="tree", **shared), expected)
    config = transformers.GenerationConfig(stop_strings=[text[5]], max_new_tokens=8, eos_token_id=2, pad_token_id=0)
    expected = target.generate(prompt, generation_config=config, tokenizer=models.tokenizer())
    ours = gsd.generate(
        target,
        prompt,
        generation_config=config,
        tokenizer=models.tokenizer(),
        assistant_model=target,
        graph_config="tree",
    )
    assert torch.equal(ours, expected)
