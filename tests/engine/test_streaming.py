"""Streamers get what transformers' own generate gives them."""

from __future__ import annotations

import asyncio
import threading

import models
import pytest
from engine.greedy import FAST, KINDS, VOCAB, Case
from transformers import (
    AsyncTextIteratorStreamer,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer


class Collector(BaseStreamer):
    def __init__(self):
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value):
        assert not self.ended
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("kind", [k if k in FAST else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
@pytest.mark.parametrize("stop", ["length", "eos", "strings", "custom"])
def test_streamed_tokens_are_the_returned_tokens(kind, stop):
    case = Case("llama-gqa", kind, 300)
    case.prompt, case.stop, case.processor = models.prompts(1, 9, seed=4, vocab=VOCAB), stop, "none"
    ours, theirs = Collector(), Collector()
    actual, expected = case.actual(streamer=ours).sequences, case.expected(streamer=theirs)
    expected = getattr(expected, "sequences", expected)
    assert actual.tolist() == expected.tolist()
    assert ours.puts == theirs.puts and ours.ended == theirs.ended == 1
    assert [token for put in ours.puts for token in put] == actual[0].tolist()


def test_text_streamers_get_the_same_text(capsys):
    tokenizer = models.tokenizer(VOCAB)
    case = Case("llama-gqa", "graph-1", 301)
    case.prompt, case.stop, case.processor, case.new_tokens = models.prompts(1, 9, vocab=VOCAB), "length", "none", 24
    text = tokenizer.decode(case.expected(return_dict_in_generate=True).sequences[0, 9:])
    assert len(text) >= 24

    case.actual(streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip() == text

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=case.actual, kwargs={"streamer": streamer})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == text and len(pieces) > 3

    async def collect():
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        thread = threading.Thread(target=case.actual, kwargs={"streamer": streamer})
        thread.start()
        pieces = [piece async for piece in streamer]
        thread.join()
        return "".join(pieces)

    assert asyncio.run(collect()) == text
