"""Drafters that read the state behind the target's last norm: in half precision, too, the text is plain decoding's."""

from __future__ import annotations

import functools

import pytest
import torch
from models import prompts, tiny
from sources.drafters import dflash_config, eagle3_config, fit_dflash, fit_eagle3, random_dflash, random_eagle3

import gsd_kernels as gsd
from gsd_kernels import GraphConfig
from gsd_kernels.backends import unavailable_reason

MISSING = unavailable_reason("cpu", torch.device("cpu"))
pytestmark = [pytest.mark.quick, pytest.mark.skipif(MISSING is not None, reason=f"compiled CPU ops: {MISSING}")]
VOCAB, LAYERS = 41, 3
GRAPHS = (
    GraphConfig(depth=3, width=3, branch=3, max_rows=24, merge_context=-1),
    GraphConfig(depth=4, width=3, branch=3, max_rows=32, merge_context=0, history_depth=2, history_width=4),
)


@functools.cache
def drafter_of(kind: str):
    target = tiny(num_hidden_layers=LAYERS, vocab_size=VOCAB)
    if kind == "dflash":
        return fit_dflash(random_dflash(dflash_config(target)), target)
    config = eagle3_config(target, eagle_aux_hidden_state_layer_ids=[0, 1, LAYERS])
    return fit_eagle3(random_eagle3(config), target)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.many)], ids=str)
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_text_is_the_targets_own_in_half_precision(kind, dtype, sampled):
    target, drafter = tiny(num_hidden_layers=LAYERS, vocab_size=VOCAB, dtype=dtype), drafter_of(kind)
    options = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
    options |= {"do_sample": True, "seed": 4, "temperature": 0.8} if sampled else {"do_sample": False}
    for seed in range(3):
        inputs = prompts(3, 17, seed=seed, vocab=VOCAB)
        plain = gsd.generate(target, **inputs, **options)
        for graph in GRAPHS:
            out = gsd.generate(
                target, **inputs, **options, drafter=drafter, draft_sources=("drafter",), graph_config=graph
            )
            assert out.stats.why_modules is None and plain.stats.why_modules is None
            assert torch.equal(out.sequences, plain.sequences)
            assert out.stats.draft_rows > 0 and sum(out.stats.accepted[2:]) > 0
