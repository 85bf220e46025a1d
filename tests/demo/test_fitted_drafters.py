"""Drafters fitted to an inflated target: the same guesses from a wider hidden state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from demo.test_inflate import tiny_llama
from sources.drafters import dflash_config, eagle3_config, fit_dflash, fit_eagle3, random_dflash, random_eagle3

import gsd_kernels as gsd
from gsd_kernels import GraphConfig
from gsd_kernels_cli import demo
from gsd_kernels_cli.demo.drafters import embedded, fitted_drafter
from gsd_kernels_cli.demo.inflate import ModelShape, inflate

GRAPH = GraphConfig(depth=3, width=2, branch=2, max_rows=12, merge_context=0)


@pytest.fixture(scope="module")
def source():
    return tiny_llama(num_hidden_layers=3).double()


def drafters(source):
    eagle3 = eagle3_config(source, eagle_aux_hidden_state_layer_ids=[0, 1, 2], draft_vocab_size=90)
    yield fit_eagle3(random_eagle3(eagle3), source, steps=25)
    yield fit_dflash(random_dflash(dflash_config(source, inner={"target_layer_ids": [0, 1]})), source, steps=25)


def test_a_fitted_drafter_guesses_as_before(source):
    shape = replace(ModelShape.of(source.config), hidden_size=96, num_layers=5, intermediate_size=128)
    inflated = inflate(source, shape)
    ids = torch.randint(3, 97, (1, 12), generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 24, "draft_sources": ("drafter",), "graph_config": GRAPH, "eos_token_id": None}
    options |= {"return_dict_in_generate": True, "pad_token_id": 0}
    for drafter in drafters(source):
        fitted = fitted_drafter(drafter, source, inflated)
        assert fitted.fc.weight.shape[1] == 96 * len(fitted.config.hidden_layers)
        before = gsd.generate(source, ids, drafter=drafter, **options)
        after = gsd.generate(inflated, ids, drafter=fitted, **options)
        assert torch.equal(after.sequences, before.sequences)
        assert after.stats.accepted == before.stats.accepted and before.stats.tokens_per_step > 1.0
        assert after.stats.target_rows == before.stats.target_rows and after.stats.merges == before.stats.merges


def test_the_embedded_drafters_are_right_now_and_then():
    source, _, tokenizer = demo.load()
    found = embedded(source)
    assert set(found) == {"eagle3", "dflash"}
    ids = tokenizer(demo.prompts("code")[-1]["text"], return_tensors="pt").input_ids
    plain = source.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
    for drafter in found.values():
        options = {"draft_sources": ("drafter",), "graph_config": GRAPH, "eos_token_id": None}
        out = gsd.generate(source, ids, drafter=drafter, max_new_tokens=24, return_dict_in_generate=True, **options)
        assert torch.equal(out.sequences, plain) and out.stats.tokens_per_step > 1.2
