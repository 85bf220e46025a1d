"""Checkpoints whose config asks for more than logits: the same text, or refused with the cure."""

from __future__ import annotations

import models
import pytest
import tiny_configs
import torch

import gsd_kernels as gsd

FAMILIES = ("LlamaForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM", "Qwen3NextForCausalLM")
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


def test_outputs_as_tuples_are_refused_with_the_cure():
    target, prompt = models.tiny(), models.prompts(1, 5)
    target.config.return_dict = False
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*model\.config\.return_dict is False: set it to True"):
        gsd.generate(target, **prompt, **GREEDY)
    target.config.return_dict = True
    assert torch.equal(gsd.generate(target, **prompt, **GREEDY), target.generate(**prompt, **GREEDY))
