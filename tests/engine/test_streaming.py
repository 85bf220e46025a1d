"""Streamers get what transformers' own generate gives them."""

from __future__ import annotations

import functools

import models
import pytest
import torch
from rotated import rotated
from transformers import (
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

import gsd_kernels as gsd


class Collector(BaseStreamer):
    def __init__(self):
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value):
        assert not self.ended
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


class StopAfter(StoppingCriteria):
    """Stops a row whose last two tokens add up to a multiple of 6, once two tokens are new."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -2:].sum(1) % 6 == 0) & (input_ids.shape[1] >= LENGTH + 2)


VOCAB, LENGTH = 32, 9
SHAPES = {
    "chain": gsd.GraphConfig.preset("chain", depth=5),
    "graph": gsd.GraphConfig(depth=5, width=4, branch=3, max_rows=32, merge_context=1),
}
STOPS = {
    "length": {},
    "eos": {"eos_token_id": [2, 9, 14]},
    "strings": {"stop_strings": list(models.CHARACTERS[3:29:2]), "tokenizer": models.tokenizer(VOCAB)},
    "custom": {"stopping_criteria": [StopAfter()]},
}


@functools.lru_cache
def pair():
    target = models.endless(vocab_size=VOCAB)
    return target, models.noised(target, 0.015)


def call(batch: int, **more):
    return {**models.prompts(batch, LENGTH, seed=6, vocab=VOCAB), "max_new_tokens": 24, "do_sample": False, **more}


def drafted(shape: str = "graph", **given):
    target, draft = pair()
    return gsd.generate(target, assistant_model=draft, graph_config=SHAPES[shape], **given)


@pytest.mark.parametrize(
    ("batch", "stop", "shape", "penalty"), rotated((1, 3), tuple(STOPS), tuple(SHAPES), (1.0, 1.1))
)
def test_a_text_is_streamed_position_by_position(batch, stop, shape, penalty):
    """Sequences that run ahead are held back, those that ended are padded, and what is taken back is never told."""
    ours, theirs, options = Collector(), Collector(), call(batch, **STOPS[stop], repetition_penalty=penalty)
    expected = pair()[0].generate(**options, streamer=theirs)
    actual = drafted(shape, **options, streamer=ours)
    assert actual.tolist() == expected.tolist()
    assert ours.puts == theirs.puts and ours.ended == theirs.ended == 1
    assert ours.puts[0] == actual[:, :LENGTH].flatten().tolist()
    assert torch.tensor(ours.puts[1:]).T.tolist() == actual[:, LENGTH:].tolist()


def test_several_answers_to_one_prompt_and_an_end_before_the_others():
    target = models.tiny(vocab_size=VOCAB)
    call = {**models.prompts(2, 9, seed=6, vocab=VOCAB), "max_new_tokens": 30, "do_sample": False}
    free = target.generate(**call, eos_token_id=None)
    eos = next(int(t) for t in free[0, 14:] if t not in free[1, 9:])
    call |= {"eos_token_id": eos, "pad_token_id": 5, "num_beams": 1}
    ours, theirs = Collector(), Collector()
    expected = target.generate(**call, streamer=theirs)
    draft = models.noised(target, 0.02)
    assert torch.equal(gsd.generate(target, **call, streamer=ours, assistant_model=draft), expected)
    assert ours.puts == theirs.puts and any(put[0] == 5 for put in ours.puts[-3:])
    ours.puts, ours.ended = [], 0
    out = gsd.generate(target, **call | {"do_sample": True, "num_return_sequences": 3, "seed": 1}, streamer=ours)
    assert torch.tensor(ours.puts[1:]).T.tolist() == out[:, 9:].tolist()
    assert ours.puts[0] == out[:, :9].flatten().tolist()


class Leaving(Collector):
    """Ends the call the ``at``-th time that it is asked while the prompt is read."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.asked = at, 0

    def ask(self) -> None:
        self.asked += 1
        if self.asked == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["operator", "modules"])
def test_a_streamer_is_asked_while_target_and_draft_read_the_prompt_and_may_end_the_call(dtype):
    target = models.tiny("llama-gqa", dtype=dtype)
    draft = models.noised(target)
    ids = models.prompts(1, 40, seed=3)["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "prefill_chunk_size": 8}
    expected = target.generate(ids, **options)
    with gsd.patch(target, assistant_model=draft, graph_config="chain") as handle:
        target.generate(ids, **options)  # which proves once how the models go
        handle.clear()
        every = Leaving(0)
        torch.testing.assert_close(target.generate(ids, streamer=every, **options), expected)
        assert every.asked >= 10, "five pieces of each model's prompt"
        for at in (1, every.asked // 2, every.asked):
            handle.clear()
            leaving = Leaving(at)
            with pytest.raises(KeyboardInterrupt):
                target.generate(ids, streamer=leaving, **options)
            assert leaving.puts == [ids[0].tolist()] and not leaving.ended
            torch.testing.assert_close(target.generate(ids, **options), expected)
