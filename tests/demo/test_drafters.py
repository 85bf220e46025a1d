"""The embedded drafters of the demo's target: right now and then, hence placed and fed as they were trained."""

from __future__ import annotations

import pytest
import torch

import gsd_kernels as gsd
from gsd_kernels_cli import demo
from gsd_kernels_cli.demo.drafters import KINDS, embedded

GRAPH = gsd.GraphConfig(depth=3, width=2, branch=2, max_rows=12, merge_context=0)
LEAST = {"eagle3": 2.15, "dflash": 1.78}
"""Tokens a step: 2.34 and 1.92; 2.04 and 1.68 where features come from the position behind theirs."""


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_the_targets_and_take_as_few_steps_as_they_were_trained_for(kind):
    target, _, tokenizer = demo.load()
    options = {"drafter": embedded(target)[kind], "draft_sources": ("drafter",), "graph_config": GRAPH}
    tokens = steps = 0
    for prompt in demo.prompts("code")[-3:]:
        ids = tokenizer(prompt["text"], return_tensors="pt").input_ids
        plain = target.generate(ids, max_new_tokens=32, do_sample=False, eos_token_id=None)
        out = gsd.generate(target, ids, max_new_tokens=32, eos_token_id=None, return_dict_in_generate=True, **options)
        assert torch.equal(out.sequences, plain)
        tokens, steps = tokens + out.stats.new_tokens, steps + out.stats.steps
    assert tokens / steps > LEAST[kind]
