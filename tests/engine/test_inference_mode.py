"""Calls in ``torch.inference_mode()`` and outside, in turn: nothing that outlives a call is an inference tensor."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
from chats import GRAPH, sources
from models import noised, prompts, tiny

import gsd_kernels as gsd

NEW = 14
MODES = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "ordinary": contextlib.nullcontext}


def inference_tensors() -> dict[int, torch.Tensor]:
    gc.collect()
    return {id(o): o for o in gc.get_objects() if isinstance(o, torch.Tensor) and o.is_inference()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sampled"),
    [("history", True), ("graph", False), ("layer_skip", True), ("heads", False), ("auto", False)],
)
def test_a_call_in_inference_mode_spoils_no_later_one(name, sampled):
    target = tiny()
    options = {"max_new_tokens": NEW, "eos_token_id": None, "do_sample": sampled}
    options |= {"seed": 3, "temperature": 0.7} if sampled else {}
    inputs = prompts(2, 13, seed=1)
    plain = gsd.generate(copy.deepcopy(target), **inputs, **options, graph_config="plain")
    arguments = sources(name, target, noised(target, 0.03))  # of which nothing was learned yet
    before = inference_tensors()
    for mode in ("inference", "ordinary", "inference", "no_grad"):
        with MODES[mode]():
            out = gsd.generate(target, **inputs, **options, **arguments, return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain), mode
        assert name == "auto" or out.stats.drafted_nodes > 0
        del out
    assert not set(inference_tensors()) - set(before)


@pytest.mark.parametrize("patched_in", MODES)
def test_a_model_patched_in_one_mode_serves_all(patched_in):
    target = tiny()
    inputs, options = prompts(2, 13), {"max_new_tokens": NEW, "eos_token_id": None, "do_sample": False}
    plain = target.generate(**inputs, **options)
    with MODES[patched_in]():
        gsd.patch(target, assistant_model=noised(target, 0.03), graph_config=GRAPH)
    for mode in (*MODES, *MODES):
        with MODES[mode]():
            assert torch.equal(target.generate(**inputs, **options), plain), mode
            dictionary = target.generate(
                **inputs, **options, repetition_penalty=1.3, output_scores=True, return_dict_in_generate=True
            )
    with torch.inference_mode():
        gsd.unpatch(target)
    expected = target.generate(**inputs, **options, repetition_penalty=1.3)
    assert torch.equal(dictionary.sequences, expected) and torch.equal(target.generate(**inputs, **options), plain)


def test_models_and_prompts_made_in_inference_mode():
    with torch.inference_mode():
        target = tiny()
        draft, inputs = noised(target, 0.03), prompts(2, 13)
    options = {"max_new_tokens": NEW, "eos_token_id": None, "do_sample": False}
    plain = target.generate(**inputs, **options)
    for mode in ("ordinary", "inference", "ordinary"):
        with MODES[mode]():
            out = gsd.generate(target, **inputs, **options, assistant_model=draft, graph_config=GRAPH)
        assert torch.equal(out, plain), mode
