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
def pair(seed: int = 0):
    target = models.endless(vocab_size=VOCAB, seed=seed, num_hidden_layers=3)
    return target, models.noised(target, 0.02)


def prompt(batch: int = 2, **more) -> dict:
    ragged = models.prompts(batch, LENGTH, seed=3, vocab=VOCAB)
    return {**ragged, "max_new_tokens": 10, "do_sample": False, **more}


@pytest.fixture
def patched():
    target, draft = pair()
    handle = gsd.patch(target, assistant_model=draft, graph_config="tree")
    yield target, handle
    gsd.unpatch(target)


def served_by_transformers(model, handle, caplog, reason: str, own=None, **call):
    """The call's output by the patched model, equal to transformers' own, after one line that names the reason."""
    own = type(model).generate if own is None else own
    torch.manual_seed(5)
    expected = own(model, **copy.deepcopy(call))
    caplog.clear()
    torch.manual_seed(5)
    with caplog.at_level(logging.INFO, logger="gsd_kernels"):
        out = model.generate(**copy.deepcopy(call))
    said = [r.getMessage() for r in caplog.records if "transformers' own generate" in r.getMessage()]
    assert len(said) == 1 and reason in said[0], said
    assert reason in handle.stats.why and handle.stats.steps == 0 and handle.stats.seconds["total"] > 0
    assert type(out) is type(expected)
    sequences, wanted = (getattr(o, "sequences", o) for o in (out, expected))
    assert torch.equal(sequences, wanted)
    # The next call is this package's.
    assert torch.equal(model.generate(**prompt()), type(model).generate(model, **prompt()))
    assert handle.stats.why is None and handle.stats.steps > 0
    return out


def refused(model, reason: str, **call):
    """``gsd_kernels.generate`` says no, patched or not."""
    with pytest.raises(validate.Unsupported, match=reason):
        gsd.generate(model, **copy.deepcopy(call))


def filled(target):
    ids = prompt()["input_ids"]
    cache = DynamicCache()
    with torch.no_grad():
        target(ids[:, :-1], use_cache=True, **{cache_argument(target): cache})
    return {cache_argument(target): cache, "attention_mask": torch.ones_like(ids)}


def old_name(target):
    """A filled cache by the name before transformers 5.24."""
    found = filled(target)
    return {"past_key_values": next(iter(found.values())), "attention_mask": found["attention_mask"]}


def embeds(target):
    ids = prompt()["input_ids"]
    return {"input_ids": None, "inputs_embeds": target.get_input_embeddings()(ids).detach()}


MODES = {
    "num_beams": lambda t: {"num_beams": 3},
    "num_beams=2": lambda t: {"num_beams": 2, "num_return_sequences": 2, "output_scores": True} | DICT,
    "num_beams=4": lambda t: {"num_beams": 4, "do_sample": True, "top_k": 5},
    "prompt_lookup_num_tokens": lambda t: {"prompt_lookup_num_tokens": 3} | one(),
    "assistant_early_exit": lambda t: {"assistant_early_exit": 1} | one(),
    "output_hidden_states": lambda t: {"output_hidden_states": True} | DICT,
    "output_attentions": lambda t: {"output_attentions": True} | DICT,
    "guidance_scale": lambda t: {"guidance_scale": 1.5} | one(),
    cache_argument(pair()[0]): filled,
    "past_key_values": old_name,
    "inputs_embeds": embeds,
    "position_ids": lambda t: {"position_ids": prompt()["attention_mask"].cumsum(1)},
    "negative_prompt_ids": lambda t: {"guidance_scale": 2.0, "negative_prompt_ids": one()["input_ids"][:, :4]} | one(),
    "attention_mask": lambda t: {"attention_mask": holed(3)},
    "right-padded": lambda t: {"attention_mask": holed(-1)},
    "assistant_model: BloomForCausalLM": lambda t: {"assistant_model": bloom(), "num_assistant_tokens": 2} | one(),
    "assistant_model: LlamaForCausalLM": lambda t: {"assistant_model": dynamic(), "num_assistant_tokens": 2} | one(),
}
DICT = {"return_dict_in_generate": True}


def one() -> dict:
    return models.prompts(1, LENGTH, seed=3, vocab=VOCAB)


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


@pytest.mark.parametrize("name", MODES)
def test_a_mode_goes_to_transformers(name, patched, caplog):
    target, handle = patched
    call = prompt() | MODES[name](target)
    reason = name.partition(":")[0] if name != cache_argument(target) else "cache"
    if name == "past_key_values":
        reason = "cache|past_key_values"
    refused(target, reason, **call)
    if name == "past_key_values":
        reason = "past_key_values"
    served_by_transformers(target, handle, caplog, reason, **call)


def decoding(model, input_ids, logits_processor, stopping_criteria, generation_config, seed=None, **kwargs):
    """A custom_generate that wants an argument of the same name as one of ours."""
    assert seed == 3
    return torch.cat([input_ids, input_ids[:, :2]], 1)


def test_another_custom_generate(patched, caplog, tmp_path):
    target, handle = patched
    out = served_by_transformers(
        target, handle, caplog, "custom_generate: a function", **prompt(), seed=3, custom_generate=decoding
    )
    assert out.shape[1] == LENGTH + 2
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "custom_generate" / "generate.py").write_text(
        "def generate(model, input_ids, max_new_tokens=4, **kwargs):\n"
        "    return model.generate(input_ids, max_new_tokens=max_new_tokens, do_sample=False)\n"
    )
    call = {"input_ids": one()["input_ids"], "max_new_tokens": 5, "trust_remote_code": True}
    served_by_transformers(target, handle, caplog, str(tmp_path), **call, custom_generate=str(tmp_path))


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


TOKENIZER = models.tokenizer(VOCAB)
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


@pytest.mark.parametrize("name", LIKE_UNPATCHED)
def test_output_or_error_is_that_of_the_unpatched_model(name):
    target, draft = pair()
    call = one() | {"max_new_tokens": 6, "do_sample": False} | LIKE_UNPATCHED[name]

    def outcome():
        torch.manual_seed(0)
        try:
            return target.generate(**call).tolist()
        except Exception as error:
            return type(error), str(error)

    expected = outcome()
    with gsd.patch(target, assistant_model=draft):
        assert outcome() == expected


# A cache that a config does not want ----------------------------------------------------------------------------------
