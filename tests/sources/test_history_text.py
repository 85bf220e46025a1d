"""The text beside the history's table: it ends with the root in every step, whatever the steps before were."""

from __future__ import annotations

import pytest
import torch
from models import prompts, tiny

import gsd_kernels as gsd
from gsd_kernels import GraphConfig
from gsd_kernels_hf.policy.base import Plan
from gsd_kernels_hf.policy.fixed import FixedPolicy
from gsd_kernels_hf.sources import history as sources_history
from gsd_kernels_hf.sources.history import History

SHAPE = GraphConfig(depth=0, branch=3, max_rows=12, history_depth=4, history_width=3)
GREEDY = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": [5, 7], "pad_token_id": 0}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.5, "seed": 3}


@pytest.fixture
def watched(monkeypatch):
    """How many look-ups began with a text whose last tokens are the root and those before it."""
    seen, propose = [], History.propose

    def checked(self, level):
        if self.known is not None and level.number == 0:
            for b, length in enumerate(self.known.length.tolist()):
                before = [t for t in level.graph.contexts[b, 0].tolist() if t >= 0]
                recent = [int(level.graph.token_ids[b, 0]), *before]
                assert self.known.text[b, length - len(recent) : length].flip(0).tolist() == recent
                seen.append(length)
        return propose(self, level)

    monkeypatch.setattr(History, "propose", checked)
    monkeypatch.setattr(History, "propose_rest", lambda *_: None)  # level by level
    return seen


@pytest.mark.parametrize("decoding", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("plain_steps", ["none", "every other", "the first"])
@pytest.mark.parametrize("batch", [1, 3])
def test_plain_steps_and_sequences_that_end_leave_no_gap(watched, monkeypatch, decoding, plain_steps, batch):
    target, inputs, plan, count = tiny(), prompts(batch, 12, seed=4), FixedPolicy.plan, []

    def planned(self):
        count.append(1)
        plain = {"none": False, "every other": len(count) % 2 == 0, "the first": len(count) < 3}[plain_steps]
        return Plan(None) if plain else plan(self)

    expected = gsd.generate(target, **inputs, **decoding, graph_config="plain")
    monkeypatch.setattr(FixedPolicy, "plan", planned)
    options = {"draft_sources": ("history",), "graph_config": SHAPE}
    assert torch.equal(gsd.generate(target, **inputs, **decoding, **options), expected)
    assert len(watched) > batch


@pytest.mark.parametrize("reuse_prefix", [True, False])
def test_a_text_that_goes_on_and_another_one_begin_anew(watched, reuse_prefix):
    target, first, other = tiny(), prompts(1, 12, seed=4)["input_ids"], prompts(1, 9, seed=5)["input_ids"]
    texts = [first]
    with gsd.patch(target, draft_sources=("history",), graph_config=SHAPE, reuse_prefix=reuse_prefix):
        for more in (other, first, other):
            inputs = {"inputs": texts[-1], "attention_mask": torch.ones_like(texts[-1])}
            whole = target.generate(**inputs, **GREEDY)
            assert torch.equal(whole, gsd.generate(target, **inputs, **GREEDY, graph_config="plain"))
            texts.append(torch.cat([whole, more], 1))
        target.generate(other, reference_ids=texts[-1][0], **GREEDY)
    assert len(watched) > 8 and min(watched) >= 10


def read_of(known):
    """What was read of each sequence."""
    return [row[:length].tolist() for row, length in zip(known.text, known.length.tolist(), strict=True)]


def test_a_reference_lies_before_the_text_and_apart_from_it(monkeypatch):
    begun, target = [], tiny()
    read = History._read_text
    monkeypatch.setattr(History, "_read_text", lambda self: (read(self), begun.append(read_of(self.known))))
    ids = prompts(2, 5, seed=1, ragged=False)["input_ids"]
    options = {"draft_sources": ("history",), "graph_config": SHAPE, "max_new_tokens": 2, "do_sample": False}
    gsd.generate(target, ids, reference_ids=torch.arange(20, 26), **options)
    assert begun == [[[-1, *range(20, 26), -1, *row] for row in ids.tolist()]]


@pytest.mark.parametrize("compiled", [False, True])
def test_without_compiled_ops_it_is_the_table_alone(monkeypatch, compiled):
    monkeypatch.setattr(sources_history, "unavailable_reason", lambda *_: None if compiled else "not built")
    history = History()
    history.check(tiny())
    assert history.mixes is compiled
    assert len(history.shares) == len(history.reliability) == len(History.reliability)
