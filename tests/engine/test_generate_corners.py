"""Return types, forms of prompts, few tokens, chunks and long prompts: as transformers does it."""

from __future__ import annotations

import itertools

import models
import pytest
import torch
from engine.greedy import VOCAB, draft_of, target_of

import gsd_kernels as gsd
from gsd_kernels_hf.policy.fixed import FixedPolicy


def generate_ours(prompt, family="llama-gqa", **kwargs):
    return gsd.generate(
        target_of(family),
        **prompt,
        **{"assistant_model": draft_of(family, 0.015), "graph_config": "graph", "do_sample": False, **kwargs},
    )


def generate_both(prompt, **kwargs):
    family = kwargs.pop("family", "llama-gqa")
    expected = target_of(family).generate(**prompt, do_sample=False, **kwargs)
    actual = generate_ours(prompt, family, **kwargs)
    return expected, actual


def test_return_types():
    prompt = models.prompts(2, 7, vocab=VOCAB)
    expected, actual = generate_both(prompt, max_new_tokens=9)
    assert type(actual) is type(expected) and actual.dtype == expected.dtype and torch.equal(actual, expected)
    expected, actual = generate_both(prompt, max_new_tokens=9, return_dict_in_generate=True)
    assert isinstance(actual, type(expected)) and actual.scores is None and actual.logits is None
    assert actual["sequences"].tolist() == expected["sequences"].tolist()
    assert actual.stats.new_tokens == 2 * 9 and sum(actual.stats.accepted) == actual.stats.sequence_steps
    for flag, other in (("output_scores", "logits"), ("output_logits", "scores")):
        expected, actual = generate_both(prompt, max_new_tokens=9, return_dict_in_generate=True, **{flag: True})
        assert len(actual[flag.removeprefix("output_")]) == 9 and getattr(actual, other) is None


def test_prompt_forms():
    ids = models.prompts(1, 12, vocab=VOCAB)["input_ids"]
    target, draft = target_of("llama-gqa"), draft_of("llama-gqa", 0.015)
    expected = target.generate(ids, max_new_tokens=8, do_sample=False)
    arguments = {"assistant_model": draft, "graph_config": "tree", "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(gsd.generate(target, ids, **arguments), expected)
    assert torch.equal(gsd.generate(target, inputs=ids, **arguments), expected)
    assert torch.equal(gsd.generate(target, input_ids=ids, **arguments), expected)
    assert torch.equal(gsd.generate(target, **arguments), target.generate(max_new_tokens=8, do_sample=False)), (
        "no prompt: from the bos token"
    )
    # Without a mask transformers takes pad tokens for padding, and so do we.
    padded = models.prompts(3, 12, seed=5, vocab=VOCAB)["input_ids"]
    assert (padded == 0).any()
    assert torch.equal(
        gsd.generate(target, padded, **arguments), target.generate(padded, max_new_tokens=8, do_sample=False)
    )


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_draft_catches_up_with_rows_that_go_on_behind_a_finished_one(backend, monkeypatch):
    """Plain steps between drafted ones: the finished row's tokens are all in the draft's cache, its root included."""
    shape = gsd.GraphConfig(depth=2, width=2, branch=2, max_rows=4)
    shapes = itertools.chain([shape] * 6, [None] * (shape.chain_rows + 3), itertools.repeat(shape))
    monkeypatch.setattr(FixedPolicy, "shape", lambda self: next(shapes))
    prompt = models.prompts(4, 15, seed=8, vocab=VOCAB)
    free = target_of("llama-gqa").generate(**prompt, max_new_tokens=40, do_sample=False)[:, 15:]
    early = next(t for t in range(1, VOCAB) if (free[:, :4] == t).any() and not (free == t).any(1).all())
    ends = {"eos_token_id": [early], "pad_token_id": 0, "max_new_tokens": 40}
    expected = target_of("llama-gqa").generate(**prompt, do_sample=False, **ends)
    actual = generate_ours(prompt, graph_config=shape, backend=backend, return_dict_in_generate=True, **ends)
    assert actual.stats.plain_steps > shape.chain_rows and torch.equal(actual.sequences, expected)
