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
