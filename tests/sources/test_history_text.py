"""The text beside the history's table has no gap, nor has it in captured steps; texts are the same."""

from __future__ import annotations

import pytest
import torch
from models import prompts, tiny
from rotated import rotated

import gsd_kernels as gsd
from gsd_kernels import GraphConfig
from gsd_kernels.backends import unavailable_reason
from gsd_kernels_hf.policy.base import Plan
from gsd_kernels_hf.policy.fixed import FixedPolicy
from gsd_kernels_hf.sources.history import History

SHAPE = GraphConfig(depth=0, branch=3, max_rows=12, history_depth=4, history_width=3)
HISTORY = {"draft_sources": ("history",), "graph_config": SHAPE}
GREEDY = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": [5, 7], "pad_token_id": 0}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.5, "seed": 3}
compiled = pytest.mark.skipif(
    unavailable_reason("cpu", torch.device("cpu")) is not None, reason="the mixture is of the compiled ops"
)


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


PLAIN = {  # of the steps counted from 1
    "no plain step": lambda step: False,
    "every third": lambda step: step % 3 == 0,
    "the first": lambda step: step < 9,
}


def same_text(monkeypatch, plain_steps, batch, decoding):
    """A text with some plain steps is the plain one."""
    target, inputs, plan, count = tiny(), prompts(batch, 12, seed=4), FixedPolicy.plan, []
    expected = gsd.generate(target, **inputs, **decoding, graph_config="plain")

    def planned(self):
        count.append(1)
        return Plan(None) if PLAIN[plain_steps](len(count)) else plan(self)

    monkeypatch.setattr(FixedPolicy, "plan", planned)
    assert torch.equal(gsd.generate(target, **inputs, **decoding, **HISTORY), expected)


CASES = rotated(PLAIN, (1, 3), (GREEDY, SAMPLED))


@pytest.mark.parametrize(("plain_steps", "batch", "decoding"), CASES, ids=str)
def test_plain_steps_and_sequences_that_end_leave_no_gap(whole, monkeypatch, plain_steps, batch, decoding):
    same_text(monkeypatch, plain_steps, batch, decoding)
    assert len(whole) == batch


@pytest.mark.parametrize("reuse_prefix", [True, False])
def test_a_text_that_goes_on_and_another_one_begin_anew(whole, reuse_prefix):
    target, first, other = tiny(), prompts(1, 12, seed=4)["input_ids"], prompts(1, 9, seed=5)["input_ids"]
    texts = [first]
    with gsd.patch(target, **HISTORY, reuse_prefix=reuse_prefix):
        for more in (other, first, other):
            inputs = {"inputs": texts[-1], "attention_mask": torch.ones_like(texts[-1])}
            text = target.generate(**inputs, **GREEDY)
            assert torch.equal(text, gsd.generate(target, **inputs, **GREEDY, graph_config="plain"))
            texts.append(torch.cat([text, more], 1))
        target.generate(other, reference_ids=texts[-1][0], **GREEDY)
    assert len(whole) == 4


def test_a_reference_lies_before_the_text_and_apart_from_it(monkeypatch):
    begun, read = [], History._read_text

    def noted(self):
        read(self)
        lengths = self.known.length.tolist()
        begun.append([row[:length].tolist() for row, length in zip(self.known.text, lengths, strict=True)])

    monkeypatch.setattr(History, "_read_text", noted)
    ids = prompts(2, 5, seed=1, ragged=False)["input_ids"]
    gsd.generate(tiny(), ids, reference_ids=torch.arange(20, 26), **HISTORY, max_new_tokens=2, do_sample=False)
    assert begun == [[[-1, *range(20, 26), -1, *row] for row in ids.tolist()]]
