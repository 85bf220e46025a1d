"""Prompts with images: the model's own forward reads them, rows of graphs follow, and the text is transformers' own."""

from __future__ import annotations

import functools
import logging

import pytest
import tiny_vision
import torch
import transformers
from tiny_vision import IMAGE, prompts

import gsd_kernels as gsd
from gsd_kernels_hf.model import prompt_inputs

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(
    not tiny_vision.PREPARED, reason="an older transformers prepares images at every step; its own generate serves them"
)
LLAVA, QWEN = "LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"
NEW = 32
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
SHORT = {**GREEDY, "max_new_tokens": 16}


@functools.cache
def model_of(name: str) -> transformers.PreTrainedModel:
    transformers.logging.set_verbosity_error()
    return tiny_vision.build(name)


def own(model, *args, **call) -> torch.Tensor:
    """What transformers itself says."""
    return type(model).generate(model, *args, **call)


@pytest.mark.parametrize("name", [LLAVA, QWEN])
def test_nothing_of_an_image_is_left_for_another_call(name, caplog):
    model = model_of(name)
    image, other = prompts(name, 1), prompts(name, 2)
    words = {"input_ids": image["input_ids"].clamp(max=IMAGE - 8)}
    same = {"input_ids": image["input_ids"], "attention_mask": image["attention_mask"]}
    turn = {**image, **{key: torch.cat([image[key], more[None]], 1) for key, more in said(image).items()}}
    calls = (image, other, words, image, same, other, turn, prompts(name, 1, 2), image)
    wanted = [own(model, **call, **SHORT) for call in calls]
    with gsd.patch(model, graph_config="tree") as handle, caplog.at_level(logging.WARNING, "gsd_kernels"):
        for number, (call, text) in enumerate(zip(calls, wanted, strict=True)):
            assert torch.equal(model.generate(**call, **SHORT), text), number
            assert handle.stats.why is None
        assert handle.stats.steps < SHORT["max_new_tokens"], "the history has seen this image's text"
        reused = [session for session in handle.engines.idle.sessions if session.key.axes is not None]
        assert reused and all(session.target.inputs is None for session in reused), "pixels are not kept"
    assert not caplog.records


def said(call: dict) -> dict:
    """Words behind a prompt, as its processor would say them, by input."""
    words = {"input_ids": torch.tensor([9, 8, 7]), "attention_mask": torch.ones(3, dtype=torch.int64)}
    return words | {name: torch.zeros(3, dtype=torch.int64) for name in call if name == "mm_token_type_ids"}


def test_what_the_rows_do_not_compute_is_handed_over_by_name(monkeypatch, caplog):
    name = QWEN
    model, call = tiny_vision.build(name), prompts(name, 1)
    text = own(model, **call, **GREEDY)
    ahead = prompt_inputs.PromptInputs.ahead
    monkeypatch.setattr(prompt_inputs.PromptInputs, "ahead", lambda *args: torch.zeros_like(ahead(*args)))
    with pytest.raises(ValueError, match=r"mm_encoder_outputs, .*: Qwen2_5_VL\w+ cannot be forwarded with graph"):
        gsd.generate(model, **call, **GREEDY)
    with gsd.patch(model) as handle, caplog.at_level(logging.WARNING, "gsd_kernels"):
        assert torch.equal(model.generate(**call, **GREEDY), text)
        assert "cannot be forwarded with graph rows behind it" in handle.stats.why
        assert "differ" in handle.stats.why
    drawn = {**SHORT, "do_sample": True, "temperature": 1.2, "top_k": 0}
    torch.manual_seed(3)
    text = own(model, **call, **drawn)
    with gsd.patch(model):
        torch.manual_seed(3)
        assert torch.equal(model.generate(**call, **drawn), text), "the refusal has drawn nothing"


@pytest.mark.parametrize("name", [LLAVA, "Qwen3_5ForConditionalGeneration"])
def test_a_placeholder_at_the_end_is_left_to_transformers_whatever_came_before(name, caplog):
    """Neither is a prompt that ends in words refused for one that did not, nor served like it."""
    model, words, ends = tiny_vision.build(name), prompts(name, 1), tiny_vision.endings(name, 0)
    calls = (ends, words, ends, tiny_vision.endings(name, 0, 2), words, tiny_vision.endings(name, 2))
    served = (False, True, False, False, True, True)
    with gsd.patch(model, graph_config="tree") as handle, caplog.at_level(logging.WARNING, "gsd_kernels"):
        for number, call in enumerate(calls):
            assert torch.equal(model.generate(**call, **SHORT), own(model, **call, **SHORT)), number
            assert (handle.stats.why is None) == served[number], (number, handle.stats.why)
            assert served[number] or f"{IMAGE}], which is no word" in handle.stats.why
