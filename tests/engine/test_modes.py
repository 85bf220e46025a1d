"""A patched model loses no feature: what this package does not serve, transformers' own ``generate`` does."""

from __future__ import annotations

import copy
import functools
import logging

import models
import pytest
import torch
import transformers
from transformers import DynamicCache, GenerationConfig

import gsd_kernels as gsd
from gsd_kernels_hf import validate
from gsd_kernels_hf.model.properties import cache_argument

VOCAB, LENGTH = 40, 9


@functools.lru_cache
def pair():
    target = models.endless(vocab_size=VOCAB, num_hidden_layers=3)
    return target, models.noised(target, 0.02)


def prompt(batch: int = 2, **more) -> dict:
    ragged = models.prompts(batch, LENGTH, seed=3, vocab=VOCAB)
    return {**ragged, "max_new_tokens": 10, "do_sample": False, **more}


@pytest.fixture
def patched():
    target, draft = pair()
    with gsd.patch(target, assistant_model=draft, graph_config="tree") as handle:
        yield target, handle


def filled(target, name):
    ids = prompt()["input_ids"]
    cache = DynamicCache()
    with torch.no_grad():
        target(ids[:, :-1], use_cache=True, **{cache_argument(target): cache})
    return prompt() | {name: cache, "attention_mask": torch.ones_like(ids)}


def embedded(target):
    ids = prompt()["input_ids"]
    return prompt(input_ids=None, inputs_embeds=target.get_input_embeddings()(ids).detach())


def one(**more) -> dict:
    return models.prompts(1, LENGTH, seed=3, vocab=VOCAB) | {"max_new_tokens": 10, "do_sample": False, **more}


def holed(at: int) -> torch.Tensor:
    mask = torch.ones_like(prompt()["input_ids"])
    mask[0, at] = 0
    return mask


@functools.lru_cache
def bloom():
    """A draft that places tokens by the cache's length (ALiBi)."""
    sizes = {"hidden_size": 32, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    return transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=VOCAB, **sizes)).double().eval()


@functools.lru_cache
def dynamic():
    """A draft whose rotary frequencies depend on the length."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    return models.tiny(vocab_size=VOCAB, rope_parameters=rope, max_position_embeddings=64)


def decoding(model, input_ids, logits_processor, stopping_criteria, generation_config, seed=None, **kwargs):
    """A custom_generate that wants an argument of the same name as one of ours."""
    assert seed == 3
    return torch.cat([input_ids, input_ids[:, :2]], 1)


def of_a_folder(folder):
    (folder / "custom_generate").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "custom_generate" / "generate.py").write_text(
        "def generate(model, input_ids, max_new_tokens=4, **kwargs):\n"
        "    return model.generate(input_ids, max_new_tokens=max_new_tokens, do_sample=False)\n"
    )
    call = {"input_ids": one()["input_ids"], "max_new_tokens": 5}
    return call | {"custom_generate": str(folder), "trust_remote_code": True}


DICT = {"return_dict_in_generate": True}
TOKENIZER = models.tokenizer(VOCAB)
MODES = {  # of a target and an empty folder: the call; its reason begins the name, but for what has none
    "num_beams=3": lambda *_: prompt(num_beams=3),
    "num_beams=2": lambda *_: prompt(num_beams=2, num_return_sequences=2, output_scores=True, **DICT),
    "num_beams=4": lambda *_: prompt(num_beams=4, do_sample=True, top_k=5),
    "prompt_lookup_num_tokens": lambda *_: one(prompt_lookup_num_tokens=3),
    "assistant_early_exit": lambda *_: one(assistant_early_exit=1),
    "output_hidden_states": lambda *_: prompt(output_hidden_states=True, **DICT),
    "output_attentions": lambda *_: prompt(output_attentions=True, **DICT),
    "guidance_scale": lambda *_: one(guidance_scale=1.5),
    "cache": lambda target, _: filled(target, cache_argument(target)),
    "past_key_values": lambda target, _: filled(target, "past_key_values"),  # the name before transformers 5.24
    "inputs_embeds": lambda target, _: embedded(target),
    "position_ids": lambda *_: prompt(position_ids=prompt()["attention_mask"].cumsum(1)),
    "negative_prompt_ids": lambda *_: one(guidance_scale=2.0, negative_prompt_ids=one()["input_ids"][:, :4]),
    "attention_mask": lambda *_: prompt(attention_mask=holed(3)),
    "right-padded": lambda *_: prompt(attention_mask=holed(-1)),
    "assistant_model: BloomForCausalLM": lambda *_: one(assistant_model=bloom(), num_assistant_tokens=2),
    "assistant_model: rope type 'dynamic'": lambda *_: one(assistant_model=dynamic(), num_assistant_tokens=2),
    "custom_generate: a function": lambda *_: prompt(seed=3, custom_generate=decoding),
    "custom_generate: '/": lambda _, folder: of_a_folder(folder / "another"),
}
LIKE_UNPATCHED = {
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
    "DoLa": {"dola_layers": "low"},
    "constraints": {"constraints": [1]},
    "forced words": {"force_words_ids": [[3]], "num_beams": 2},
    "groups of beams": {"num_beam_groups": 2, "num_beams": 4},
    "heads of the model's own": {"use_mtp": True},
    "a way of speculating": {"speculation_type": "mtp"},
    "healing": {"token_healing": True, "tokenizer": TOKENIZER},
    "labels": {"labels": torch.ones(1, LENGTH, dtype=torch.int64)},
    "an encoder's outputs": {"encoder_outputs": (torch.ones(1, 2),)},
    "synchronised GPUs": {"synced_gpus": True},
    "stop strings and beams": {"stop_strings": ["a"], "num_beams": 2, "tokenizer": TOKENIZER},
    "padding alone": {"attention_mask": torch.zeros(1, LENGTH, dtype=torch.int64)},
    "a tuple for a cache": {"past_key_values": ((torch.ones(1),),)},
    "no beams": {"num_beams": 0},
    "no tokens": {"max_new_tokens": 0},
    "an invented argument": {"depth": 3},
}
"""Calls that transformers may refuse as well, by whatever reason."""


def outcome(model, call):
    torch.manual_seed(5)
    try:
        out = model.generate(**copy.deepcopy(call))
    except Exception as error:
        return type(error), str(error)
    return type(out), getattr(out, "sequences", out).tolist()


@pytest.mark.parametrize("name", [*MODES, *LIKE_UNPATCHED])
def test_output_or_error_is_that_of_the_unpatched_model(name, caplog, tmp_path):
    """Of a mode that transformers alone serves one line names the reason, and the next call is this package's."""
    target, draft = pair()
    call = MODES[name](target, tmp_path) if name in MODES else one(**LIKE_UNPATCHED[name])
    expected, next_one = outcome(target, call), outcome(target, prompt())
    caplog.set_level(logging.INFO, logger="gsd_kernels")
    with gsd.patch(target, assistant_model=draft) as handle:
        assert outcome(target, call) == expected
        if name in MODES:
            said = [line for line in caplog.messages if "transformers' own generate" in line]
            assert len(said) == 1 and name in said[0] and name in handle.stats.why, said
            assert handle.stats.steps == 0 and handle.stats.seconds["total"] > 0 and type(expected[1]) is list
        assert outcome(target, prompt()) == next_one
        assert handle.stats.why is None and handle.stats.steps > 0


@pytest.mark.parametrize(
    "ours",
    [
        {"graph_config": "chain"},
        {"seed": 3},
        {"draft_sources": ("history",)},
        {"reference_ids": torch.tensor([3, 4])},
        {"backend": "reference"},
        {"reuse_prefix": False},
        {"assistant_model": [models.noised(pair()[0], 0.1)]},
    ],
    ids=lambda ours: next(iter(ours)),
)
def test_an_option_of_ours_in_such_a_call_is_named(patched, ours):
    target, _ = patched
    if "draft_sources" in ours:
        ours = ours | {"assistant_model": False}
    with pytest.raises(ValueError, match=f"^{next(iter(ours))}: .*num_beams=2") as caught:
        target.generate(**prompt(), num_beams=2, **ours)
    assert not isinstance(caught.value, validate.Unsupported)


def test_arguments_by_position(patched):
    target, handle = patched
    ids, config = one()["input_ids"], GenerationConfig(max_new_tokens=6, pad_token_id=0)
    penalty = transformers.LogitsProcessorList([transformers.RepetitionPenaltyLogitsProcessor(1.4)])
    expected = type(target).generate(target, ids, config, penalty)
    assert torch.equal(target.generate(ids, config, penalty), expected) and handle.stats.why is None
    beams = GenerationConfig(max_new_tokens=6, pad_token_id=0, num_beams=3)
    assert torch.equal(target.generate(ids, beams, penalty), type(target).generate(target, ids, beams, penalty))
    assert handle.stats.why.startswith("num_beams=3")
    with pytest.raises(TypeError, match="generation_config"):
        target.generate(ids, config, generation_config=config)
    with pytest.raises(TypeError, match="position"):
        target.generate(ids, *([None] * 20))
