"""Return types, forms of prompts, few tokens, chunks and long prompts: as transformers does it."""

from __future__ import annotations

import itertools
import threading

import models
import pytest
import torch
from engine.greedy import VOCAB, draft_of, target_of
from transformers import (
    StoppingCriteria,
)

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


def test_rows_finish_at_different_steps():
    """An end-of-text token in one row, while the others go on: padding, and rows that accept different lengths."""
    prompt = models.prompts(4, 15, seed=8, vocab=VOCAB)
    free = target_of("llama-gqa").generate(**prompt, max_new_tokens=24, do_sample=False)[:, 15:]
    early = int(free[2, 3])
    expected, actual = generate_both(prompt, max_new_tokens=24, eos_token_id=[early], pad_token_id=0)
    ends = [(row == early).nonzero().flatten().tolist()[:1] for row in expected[:, 15:]]
    assert len({tuple(e) for e in ends}) > 1, "the case is trivial"
    assert torch.equal(actual, expected)


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


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_few_new_tokens(batch, tokens):
    for length in (1, 2, 30):
        expected, actual = generate_both(models.prompts(batch, length, vocab=VOCAB), max_new_tokens=tokens)
        assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window"])
def test_chunked_prefill(family, chunk):
    prompt = models.prompts(3, 40, seed=2, vocab=VOCAB)
    expected, actual = generate_both(prompt, max_new_tokens=12, family=family)
    assert actual.tolist() == expected.tolist()
    chunked = generate_ours(prompt, family, max_new_tokens=12, prefill_chunk_size=chunk)
    assert chunked.tolist() == expected.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 1000])
def test_long_prompt(chunk):
    model = models.tiny(vocab_size=VOCAB, max_position_embeddings=16384, dtype=torch.float32, num_hidden_layers=1)
    model.generation_config.eos_token_id = None
    prompt = models.prompts(1, 8192, vocab=VOCAB)
    expected = model.generate(
        **prompt, max_new_tokens=12, do_sample=False, output_scores=True, return_dict_in_generate=True
    )
    gap = min(float(s.topk(2).values.diff().abs()) for s in expected.scores)
    assert gap > 1e-4, "a near-tie: take another seed"
    actual = gsd.generate(
        model,
        **prompt,
        max_new_tokens=12,
        do_sample=False,
        assistant_model=models.noised(model, 0.01),
        graph_config="graph",
        prefill_chunk_size=chunk,
        return_dict_in_generate=True,
    )
    assert actual.sequences.tolist() == expected.sequences.tolist()
    assert actual.stats.steps < 12


class Trie:
    """Allowed continuations of every row of the batch; knows only the row's own texts."""

    def __init__(self, texts: list[list[list[int]]], prompt_length: int):
        self.texts, self.prompt_length = texts, prompt_length

    def __call__(self, batch_id: int, ids: torch.Tensor) -> list[int]:
        so_far = ids[self.prompt_length :].tolist()
        return sorted({t[len(so_far)] for t in self.texts[batch_id] if t[: len(so_far)] == so_far})


def test_prefix_function_sees_only_its_own_row():
    """A function that knows nothing of another row's text returns nothing for it, which transformers refuses."""
    gen = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, VOCAB, (6, 10), generator=gen).tolist() for _ in range(3)]
    prompt = models.prompts(3, 8, vocab=VOCAB)
    expected, actual = generate_both(prompt, max_new_tokens=10, prefix_allowed_tokens_fn=Trie(texts, 8))
    assert actual.tolist() == expected.tolist()
    assert all(row in texts[b] for b, row in enumerate(actual[:, 8:].tolist()))


def test_max_time_ends_generation():
    prompt = models.prompts(2, 8, vocab=VOCAB)
    actual = generate_ours(prompt, max_new_tokens=64, max_time=0.0)
    full = target_of("llama-gqa").generate(**prompt, max_new_tokens=64, do_sample=False)
    assert 8 < actual.shape[1] < 8 + 64
    assert actual.tolist() == full[:, : actual.shape[1]].tolist()


def test_a_shared_stop_flag_reaches_every_row():
    """A server's criterion is an object that another thread flips; every row must look at that very object."""

    class Flag(StoppingCriteria):
        def __init__(self):
            self.lock, self.stop, self.seen = threading.Lock(), False, 0

        def __call__(self, input_ids, scores, **kwargs):
            self.seen += 1
            self.stop |= self.seen >= 9
            return torch.full((input_ids.shape[0],), self.stop, dtype=torch.bool)

    prompt = models.prompts(3, 8, vocab=VOCAB)
    out = generate_ours(prompt, max_new_tokens=64, stopping_criteria=[Flag()])
    assert out.shape[1] < 8 + 32
