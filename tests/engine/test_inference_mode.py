"""Calls in ``torch.inference_mode()`` and outside, in turn: nothing that outlives a call is an inference tensor."""

from __future__ import annotations

import contextlib

import pytest
import torch
from chats import GRAPH
from models import noised, prompts, tiny

import gsd_kernels as gsd

NEW = 14
MODES = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "ordinary": contextlib.nullcontext}


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
