"""What is honoured, irrelevant or refused: complete for the installed transformers, named, changing nothing."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import pickle

import models
import pytest
import tiny_configs
import torch
import transformers
from models import prompts, tiny
from transformers import GenerationConfig, GenerationMixin

import gsd_kernels as gsd
from gsd_kernels_cli import comparison
from gsd_kernels_hf import validate
from gsd_kernels_hf.engine import resolved
from gsd_kernels_hf.engine.decoder import GraphDecoder
from gsd_kernels_hf.validate import options
from gsd_kernels_serve.logprobs import of_prompt

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


def test_what_is_no_language_model_is_named():
    config = transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    for model, error in (
        (torch.nn.Linear(2, 2), TypeError),
        (transformers.T5ForConditionalGeneration(config), ValueError),
    ):
        with pytest.raises(error, match=r"^model: (expected|T5)"):
            gsd.generate(model, IDS, max_new_tokens=4)


IDS = models.prompts(2, 10, ragged=False)["input_ids"]


@functools.lru_cache
def pair():
    target = models.tiny(dtype=torch.float32)
    return target, models.noised(target)


def test_patching_twice_and_unpatching_the_unpatched():
    target, draft = pair()
    with pytest.raises(ValueError, match="model: not patched"):
        gsd.unpatch(target)
    same = torch.ones(3, dtype=torch.int64)
    with gsd.patch(target, assistant_model=draft, reference_ids=same) as handle:
        assert gsd.patch(target, assistant_model=draft, reference_ids=same) is handle, "a notebook's cell, run again"
        for other in ({}, {"assistant_model": draft, "reference_ids": same + 1}):
            with pytest.raises(ValueError, match="model: already patched"):
                gsd.patch(target, **other)
        assert target.generate is vars(target)["generate"] and target.config._attn_implementation == "sdpa"
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


@pytest.fixture(scope="module")
def target():
    return tiny()


CALLS = {
    "generate": lambda target, **given: gsd.generate(target, **prompts(1, 5), max_new_tokens=2, **given),
    "patch": lambda target, **given: gsd.patch(target, **given),
    "GraphDecoder": lambda target, **given: GraphDecoder(**given),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("drafters", "drafter"),
        ("reuse_histroy", "reuse_history"),
    ],
)
def test_an_unknown_option_names_the_nearest(call, name, nearest, target):
    before = dict(vars(target))
    with pytest.raises(TypeError, match=rf"unknown (option|argument) '{name}'; did you mean '{nearest}'\?"):
        CALLS[call](target, **{name: "graph"})
    assert vars(target) == before


def test_arguments_of_transformers_are_named_too_and_the_rest_is_left_to_it(target):
    with pytest.raises(TypeError, match=r"unknown argument 'max_new_token'; did you mean 'max_new_tokens'\?"):
        gsd.generate(target, **prompts(1, 5), max_new_token=2)
    with (
        gsd.patch(target) as handle,
        pytest.raises(TypeError, match=r"unknown argument 'do_sampel'; did you mean 'do_sample'\?"),
    ):
        target.generate(**prompts(1, 5), do_sampel=True)
    assert handle.stats is None
    with pytest.raises(ValueError, match="xyzzy"):
        gsd.generate(target, **prompts(1, 5), xyzzy=1)
    known = {*inspect.signature(target.forward).parameters} - {"self", "kwargs"}
    resolved.check_names(known, target)  # what the model's own code takes is no misspelling


def test_fields_of_a_shape():
    for make in (
        lambda: gsd.GraphConfig(dept=3),
        lambda: gsd.GraphConfig().replace(dept=3),
        lambda: gsd.GraphConfig.preset("chain", dept=3),
    ):
        with pytest.raises(TypeError, match=r"graph_config: unknown field 'dept'; did you mean 'depth'\?"):
            make()
    with pytest.raises(TypeError, match="depth: expected an int, got 'x'"):
        gsd.GraphConfig.preset("chain", depth="x")
    config = gsd.GraphConfig(3, max_rows=16)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config.replace(depth=3)
    assert list(inspect.signature(gsd.GraphConfig).parameters)[:2] == ["depth", "width"]


def test_lengths_of_drafts_in_transformers_words_are_reported_once(target, caplog, monkeypatch):
    monkeypatch.setattr(options, "_said", set())
    caplog.set_level(logging.WARNING, logger="gsd_kernels")
    ids = prompts(1, 5)
    expected = gsd.generate(target, **ids, max_new_tokens=3)
    assert not caplog.records, "transformers' own default is nobody's wish"
    for _ in range(2):
        again = gsd.generate(target, **ids, max_new_tokens=3, num_assistant_tokens=7)
        assert again.equal(expected)
    (record,) = caplog.records
    assert "num_assistant_tokens=7 of the call has no effect" in record.message and "depth=7" in record.message
    monkeypatch.setattr(target.generation_config, "assistant_confidence_threshold", 0.3, raising=False)
    gsd.generate(target, **ids, max_new_tokens=3)
    assert "assistant_confidence_threshold=0.3 of the model's generation_config" in caplog.records[-1].message


def test_an_unknown_generation_option_is_reported_once_whatever_its_value(target, caplog, monkeypatch):
    monkeypatch.setattr(options, "_said", set())
    caplog.set_level(logging.WARNING, logger="gsd_kernels")
    for value in (1, 1, 2):
        monkeypatch.setattr(target.generation_config, "codebooks", value, raising=False)
        gsd.generate(target, **prompts(1, 5), max_new_tokens=3)
    (record,) = caplog.records
    assert "generation option codebooks=1 is not known to gsd_kernels" in record.message


FAMILIES = ("LlamaForCausalLM", "MixtralForCausalLM", "Qwen3NextForCausalLM")
FIELDS = {"output_router_logits": True, "output_attentions": True, "output_hidden_states": True, "use_cache": False}
GREEDY = {"max_new_tokens": 9, "do_sample": False}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_config_asks_for_beside_logits_changes_no_text(name):
    target = tiny_configs.build(name, 4 if name == "Qwen3NextForCausalLM" else 2)
    target.set_attn_implementation("eager")  # which alone returns attention weights
    draft, prompt = models.noised(target, 0.02), models.prompts(2, 7, ragged=False, vocab=tiny_configs.VOCAB)
    text = target.generate(**prompt, **GREEDY)
    for field, value in FIELDS.items():
        before = getattr(target.config, field, None)
        setattr(target.config, field, value)
        found = gsd.generate(target, **prompt, **GREEDY, assistant_model=draft, graph_config="tree")
        assert torch.equal(found, text), field
        assert getattr(target.config, field) == value
        setattr(target.config, field, before)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MixtralForCausalLM"])
def test_log_probabilities_and_comparisons_ask_for_logits_alone(name):
    target, given = tiny_configs.build(name, 2), []
    target.set_attn_implementation("eager")
    for field in ("output_router_logits", "output_attentions", "output_hidden_states"):
        setattr(target.config, field, True)
    target.register_forward_hook(lambda _, __, output: given.append(output))
    ids = models.prompts(1, 7, vocab=tiny_configs.VOCAB)["input_ids"]
    with torch.no_grad():
        of_prompt(target, ids, 1, lambda: None)
        comparison._logits_and_noise(target, ids)
    assert len(given) == 4
    beside = ("router_logits", "attentions", "hidden_states")
    assert not any(getattr(output, part, None) for output in given for part in beside)


@pytest.mark.parametrize("field", ["output_attentions", "output_hidden_states"])
def test_a_config_whose_options_were_made_of_it(field):
    """A checkpoint without generation options: transformers takes the field over, and returns what it asks for."""
    target, prompt = models.tiny(), models.prompts(2, 7, ragged=False)
    target.set_attn_implementation("eager")
    text = target.generate(**prompt, **GREEDY)
    setattr(target.config, field, True)
    target.generation_config = GenerationConfig.from_model_config(target.config)
    ids = {"return_dict_in_generate": False}
    assert torch.equal(target.generate(**prompt, **GREEDY, **ids), text)
    assert torch.equal(gsd.generate(target, **prompt, **GREEDY, **ids), text)
    asked = target.generate(**prompt, **GREEDY)
    assert torch.equal(asked.sequences, text) and getattr(asked, field.removeprefix("output_")) is not None
    with pytest.raises(ValueError, match=f"{field}=True.*a forward of the finished text has them"):
        gsd.generate(target, **prompt, **GREEDY)
    gsd.patch(target)
    out = target.generate(**prompt, **GREEDY)
    assert torch.equal(out.sequences, text) and getattr(out, field.removeprefix("output_")) is not None


def test_outputs_as_tuples_are_refused_with_the_cure():
    target, prompt = models.tiny(), models.prompts(1, 5)
    target.config.return_dict = False
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*model\.config\.return_dict is False: set it to True"):
        gsd.generate(target, **prompt, **GREEDY)
    target.config.return_dict = True
    assert torch.equal(gsd.generate(target, **prompt, **GREEDY), target.generate(**prompt, **GREEDY))
