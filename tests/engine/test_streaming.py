"""What a call tells while it writes and behind it: streamers, strings that end a text, statistics."""

from __future__ import annotations

import functools
import json
import random

import models
import pytest
import torch
import two_tokenizers as two
from models import rotated
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import Unigram
from transformers import StoppingCriteria
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.streamers import BaseStreamer

import gsd_kernels as gsd
from gsd_kernels_hf.engine.output import ENOUGH_PLAIN_STEPS
from gsd_kernels_hf.engine.stop_strings import StopStrings


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
    assert drafted(shape, **options, streamer=ours).tolist() == expected.tolist()
    assert ours.puts == theirs.puts and ours.ended == theirs.ended == 1


def test_several_answers_to_one_prompt_and_an_end_before_the_others():
    target = models.tiny(vocab_size=VOCAB)
    asked, ours, theirs = call(2, eos_token_id=None), Collector(), Collector()
    free = target.generate(**asked)
    eos = next(int(t) for t in free[0, 14:] if t not in free[1, 9:])
    asked |= {"eos_token_id": eos, "pad_token_id": 5, "max_new_tokens": 30}
    expected = target.generate(**asked, streamer=theirs)
    assert torch.equal(gsd.generate(target, **asked, streamer=ours, assistant_model=pair()[1]), expected)
    assert ours.puts == theirs.puts and any(put[0] == 5 for put in ours.puts[-3:])
    ours = Collector()
    out = gsd.generate(target, **asked | {"do_sample": True, "num_return_sequences": 3, "seed": 1}, streamer=ours)
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
    target, ids = models.tiny(dtype=dtype), models.prompts(1, 40, seed=3)["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "prefill_chunk_size": 8}
    expected = target.generate(ids, **options)
    with gsd.patch(target, assistant_model=models.noised(target), graph_config="chain") as handle:
        target.generate(ids, **options)  # which proves once how the models go
        for at in (0, 1, 10):
            handle.clear()
            leaving = Leaving(at)
            if at:
                with pytest.raises(KeyboardInterrupt):
                    target.generate(ids, streamer=leaving, **options)
                assert leaving.puts == [ids[0].tolist()] and not leaving.ended
            torch.testing.assert_close(target.generate(ids, streamer=Collector(), **options), expected)


# Strings that end a text: transformers' own decision at every token, of what the text has alone.


@functools.cache
def unigram():
    pieces = [*two.SPECIAL, "▁", *"abcdef", "▁a", "ab", "bc", "▁abc", "é", "cé▁a", "aaaa"]
    backend = Tokenizer(Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=3))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return two.wrapped(backend)


KINDS = {
    "byte-level": two.byte_level,
    "bytes that are tokens": two.sentencepiece,
    "metaspace": unigram,
    "single characters": models.tokenizer,
}


def strings_of(rng: random.Random, tokenizer, ids: list[int]) -> list[str]:
    """Parts of a text, from within its tokens and characters, ones that repeat themselves, and others."""
    text = tokenizer.decode(ids) or "a"
    cuts = [sorted(rng.choices(range(len(text) + 1), k=2)) for _ in range(3)]
    parts = [text[a : min(b, a + 12)] for a, b in cuts]
    found = [*parts, "aaa", "ab" * 3, " ", "é", "zq", text[-1] * 2, rng.choice(two.SPECIAL)]
    return rng.sample([string for string in found if string], rng.randint(1, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_the_decision_is_transformers_own_at_every_token(kind):
    tokenizer, rng, stops = KINDS[kind](), random.Random(7), 0
    size = len(tokenizer) + 3  # rows of the logits that are no tokens
    for _ in range(12):
        told = tokenizer("ab abc the café aaaa aaab", add_special_tokens=False)["input_ids"]
        ids = [[rng.choice(told) if rng.random() < 0.7 else rng.randrange(size) for _ in range(24)] for _ in range(3)]
        given = strings_of(rng, tokenizer, ids[0])
        try:
            theirs = StopStringCriteria(tokenizer, given)
        except ValueError:
            with pytest.raises(ValueError, match="stop_strings: no token of this tokenizer ends"):
                StopStrings(tokenizer, given)
            continue
        ours = StopStrings(tokenizer, given)
        for length in range(1, 25):
            text = torch.tensor(ids)[:, :length]
            expected = theirs(text, None)
            assert torch.equal(ours(text, None), expected), (given, text)
            stops += int(expected.sum())
    assert stops > 20


def test_a_string_may_end_within_a_character_and_begin_in_the_prompt():
    tokenizer = two.byte_level()
    ids = torch.tensor([tokenizer("🐕 café 你好")["input_ids"]])
    for given in ("🐕", "é 你", "好", "f", ""):
        theirs, ours = StopStringCriteria(tokenizer, given), StopStrings(tokenizer, given)
        found = [(bool(theirs(ids[:, :n], None)), bool(ours(ids[:, :n], None))) for n in range(1, ids.shape[1] + 1)]
        assert any(a for a, _ in found) and all(a == b for a, b in found), given
    for given, error in (([], ValueError), ([5], TypeError), (["☃"], ValueError)):
        with pytest.raises(error, match="stop_strings"):
            StopStrings(models.tokenizer(), given)


# Statistics of a call: shapes and sources add up, and they can be read.


class Guess(gsd.DraftSource):
    """Proposes one token that is right seldom, and one that nobody asked for."""

    name = "guess"

    def propose(self, level):
        shape = (*level.frontier.token_ids.shape, 2)
        return gsd.Proposal(torch.tensor([5, 6], dtype=torch.int32).expand(shape), torch.full(shape, -0.7))


def statistics_of(batch: int = 1, **options):
    target = models.tiny(seed=3)
    options = {"assistant_model": models.noised(target), "return_dict_in_generate": True} | options
    return gsd.generate(target, **models.prompts(batch, 9), max_new_tokens=32, do_sample=False, **options).stats


@pytest.mark.parametrize(("batch", "backend"), [(1, "auto"), (3, "reference")])
def test_shapes_and_sources_add_up_to_the_totals(batch, backend):
    shape = gsd.GraphConfig(history_depth=2)
    sources = {"draft_sources": ("model", Guess(), "history"), "graph_config": shape}
    stats = statistics_of(batch, backend=backend, **sources)
    assert list(stats.sources) == ["model", "guess", "history"] and stats.sources["guess"].proposed
    each = stats.sources.values()
    assert sum(stats.shapes.values()) == stats.steps and stats.shapes.get("plain", 0) == stats.plain_steps
    assert sum(source.accepted for source in each) == stats.new_tokens - stats.sequence_steps
    proposed, rows = sum(source.proposed for source in each), stats.target_rows - batch * stats.steps
    assert proposed == rows if batch == 1 else proposed <= rows
    assert all(0 <= source.accepted <= source.proposed and source.seconds > 0 for source in each)
    assert sum(source.seconds for source in each) <= stats.seconds["draft"]


def test_statistics_are_a_table_a_line_and_json_and_say_what_the_gain_is_estimated_from():
    """A fixed shape times no plain step and learns no costs; auto learns them."""
    stats = statistics_of(graph_config="graph")
    stats.left_out = ["<b>mine</b>"]
    assert str(stats).startswith(f"new tokens       {stats.new_tokens} in 1 sequence, ")
    assert "\n" not in repr(stats) and f"{stats.new_tokens} tokens in {stats.steps} steps" in repr(stats)
    page = stats._repr_html_()
    assert page.startswith("<table>") and "&lt;b&gt;mine&lt;/b&gt;" in page and "<b>" not in page
    found = json.loads(json.dumps(stats.as_dict()))
    assert found["sources"]["model"] == vars(stats.sources["model"]) and found["shapes"] == stats.shapes
    assert found["gain"] is None and "not known" in str(stats)
    auto = statistics_of(graph_config="auto")
    assert auto.plain_seconds > 0 and auto.gain > 0 and auto.plain_from in str(auto)
    few = auto.plain_steps < ENOUGH_PLAIN_STEPS
    assert ("the costs learned from" if few else "plain steps of this call") in auto.plain_from
