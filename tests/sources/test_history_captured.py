"""The history's mixture inside captured steps, on a CPU taken for a GPU: the same texts, and a text without a gap."""

from __future__ import annotations

import fake_cuda
import pytest
import torch
from models import prompts, tiny

import gsd_kernels as gsd
from gsd_kernels import GraphConfig
from gsd_kernels.backends import unavailable_reason
from gsd_kernels_hf.engine.engine import engines_of
from gsd_kernels_hf.policy.base import Plan
from gsd_kernels_hf.policy.fixed import FixedPolicy
from gsd_kernels_hf.sources.history import History

pytestmark = pytest.mark.skipif(
    unavailable_reason("cpu", torch.device("cpu")) is not None, reason="the mixture is of the compiled ops"
)

SHAPE = GraphConfig(depth=0, branch=3, max_rows=12, history_depth=4, history_width=3)
HISTORY = {"draft_sources": ("history",), "graph_config": SHAPE}
GREEDY = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.5, "seed": 3}


@pytest.fixture
def cuda(monkeypatch):
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def whole(monkeypatch):
    """How many texts ended with an index that holds them, whatever was read before."""
    texts, end = [], History.end

    def checked(self):
        known, state = self.known, self.state
        for b, (begin, length) in enumerate(zip(state.kv_start.tolist(), state.out_len.tolist(), strict=True)):
            text = state.tokens[b, begin:length].tolist()
            read = known.text[b, : int(known.length[b])].tolist()
            assert read[-1 - len(text) :] == [-1, *text]
            texts.append(text)
        end(self)

    monkeypatch.setattr(History, "end", checked)
    return texts


@pytest.mark.parametrize("decoding", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("plain_steps", ["none", "every third", "the first"])
@pytest.mark.parametrize("batch", [1, 3])
def test_texts_are_equal_and_without_a_gap(cuda, whole, monkeypatch, decoding, plain_steps, batch):
    target, inputs, plan, count = tiny(), prompts(batch, 12, seed=4), FixedPolicy.plan, []

    def planned(self):
        count.append(1)
        plain = {"none": False, "every third": len(count) % 3 == 0, "the first": len(count) < 9}[plain_steps]
        return Plan(None) if plain else plan(self)

    expected = gsd.generate(target, **inputs, **decoding, graph_config="plain")
    monkeypatch.setattr(FixedPolicy, "plan", planned)
    out = gsd.generate(target, **inputs, **decoding, **HISTORY, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected) and len(whole) == batch
    assert cuda.counts["replays"] > 4 and out.stats.steps < 30


def test_captured_steps_accept_what_others_do(monkeypatch):
    def steps():
        out = gsd.generate(tiny(), **prompts(2, 12, seed=4), **GREEDY, **HISTORY, return_dict_in_generate=True)
        return out.sequences.tolist(), out.stats.accepted

    expected = steps()
    cuda = fake_cuda.install(monkeypatch)
    assert steps() == expected and cuda.counts["replays"] > 4


@pytest.mark.parametrize("reuse_prefix", [True, False])
def test_a_text_that_outgrows_its_room_and_references_are_captured_anew(cuda, whole, reuse_prefix):
    """In one session: a long text, one that goes on, one with a text to repeat, one without."""
    target, first, other = tiny(), prompts(1, 12, seed=4)["input_ids"], prompts(1, 9, seed=5)["input_ids"]
    endless = {"eos_token_id": None}
    calls = [(first, {}), (other, {"reference_ids": torch.arange(20, 90).repeat(9)}), (first, {"max_new_tokens": 300})]
    calls += [(first, {}), (other, {"reference_ids": torch.arange(20, 30)})]
    with gsd.patch(target, **HISTORY, reuse_prefix=reuse_prefix):
        for ids, options in calls:
            inputs = {"inputs": ids, "attention_mask": torch.ones_like(ids)}
            expected = gsd.generate(target, **inputs, **GREEDY | endless | {"graph_config": "plain"} | options)
            before = cuda.counts["replays"]
            assert torch.equal(target.generate(**inputs, **GREEDY | endless | options), expected)
            assert cuda.counts["replays"] > before
    assert len(whole) == len(calls)


def test_what_was_learned_of_a_model_is_drafted_with(cuda, tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    target, inputs = tiny(), prompts(1, 12, seed=4)
    run = {**GREEDY, **HISTORY, "return_dict_in_generate": True, "reuse_history": False}
    expected = gsd.generate(target, **inputs, **run)
    gsd.learn(target, prompts=[expected.sequences[0, :n] for n in (4, 12, 20, 30)], new_tokens=24, progress=False)
    engines_of(target).clear()
    for learned in (True, False):
        out = gsd.generate(target, **inputs, **run, learned=learned)
        assert torch.equal(out.sequences, expected.sequences)
        assert (out.stats.steps < expected.stats.steps) == learned
    assert cuda.counts["replays"] > 4
