"""Checkpoints whose config asks for more than logits: the same text, or refused with the cure."""

from __future__ import annotations

import models
import pytest
import tiny_configs
import torch
from transformers import GenerationConfig

import gsd_kernels as gsd
from gsd_kernels_cli import comparison
from gsd_kernels_serve.logprobs import of_prompt

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
