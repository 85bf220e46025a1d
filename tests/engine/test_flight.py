"""The next step is queued before the host hears of the last one: the same texts and counts; on a CPU taken for a GPU.

A replay there is over at once, so whatever the host reads of a step after the next one was queued is the next one's.
"""

from __future__ import annotations

import fake_cuda
import pytest
import torch
from engine.capturing import SAMPLED, text
from models import CHARACTERS, noised, tiny, tokenizer
from transformers import StoppingCriteria

from gsd_kernels import patch, unpatch
from gsd_kernels_hf.engine import loop
from gsd_kernels_hf.engine.engine import engines_of
from gsd_kernels_hf.engine.flight import Launched

LONG = {"max_new_tokens": 24}


@pytest.fixture
def pair():
    target = tiny()
    return target, noised(target)


@pytest.fixture
def cuda(monkeypatch):
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def flown(monkeypatch):
    """Whether each step that the host heard of had another one queued behind it, in order.

    Nobody is given the record of such a step, over which that other one may be writing.
    """
    found, hear, observed = [], Launched.hear, Launched.observed

    def held(launched, heard):
        seen = observed(launched, heard)
        assert (seen.verified is None) == (launched.sent is not None)
        return seen

    monkeypatch.setattr(Launched, "observed", held)
    monkeypatch.setattr(Launched, "hear", lambda launched: (found.append(launched.sent is not None), hear(launched))[1])
    return found


class Streamer:
    """Keeps what it is given."""

    def __init__(self, fails_at=None):
        self.given, self.fails_at = [], fails_at

    def put(self, value):
        self.given.append(value.tolist())
        if len(self.given) == self.fails_at:
            raise ConnectionError("the reader went away")

    def end(self):
        self.given.append("end")


def ended(pair, name, rows, **options):
    """A token in the middle of a text, which ends it there."""
    return int(text(pair, name, rows, **options)[0, 9 + 11])


CASES = {
    "plain": ("plain", 1, {}),
    "plain, sampled": ("plain", 2, SAMPLED),
    "graph": ("graph", 1, {}),
    "graph, sampled": ("graph", 2, SAMPLED),
    "heads": ("heads", 2, {}),
    "layer skip, sampled": ("layer_skip", 1, SAMPLED),
    "chain, speculative": ("chain", 1, {**SAMPLED, "criterion": "speculative"}),
    "chain, block": ("chain", 2, {**SAMPLED, "criterion": "block"}),
    "chain, typical": ("chain", 1, {**SAMPLED, "criterion": "typical"}),
}


@pytest.mark.parametrize("ends", [False, True], ids=["to its length", "by a token"])
@pytest.mark.parametrize("case", CASES)
def test_texts_streams_and_counts_are_the_same(pair, case, ends, flown, request):
    name, rows, options = CASES[case]
    options = {**options, **LONG, "return_dict_in_generate": True}
    if ends:
        options["eos_token_id"] = ended(pair, name, rows, **{**CASES[case][2], **LONG})
    monkeypatch = request.getfixturevalue("monkeypatch")
    cuda = fake_cuda.install(monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "may_fly", lambda *_, **__: False)
        engines_of(pair[0]).clear()
        before = Streamer()
        expected = text(pair, name, rows, **options, streamer=before)
        assert not any(flown) and cuda.counts["replays"] > 0
    flown.clear()
    engines_of(pair[0]).clear()
    streamer = Streamer()
    got = text(pair, name, rows, **options, streamer=streamer)
    assert torch.equal(got.sequences, expected.sequences) and streamer.given == before.given
    assert sum(flown) >= len(flown) - 2 and len(flown) == got.stats.steps
    for count in ("steps", "plain_steps", "new_tokens", "sequence_steps", "accepted", "shapes", "drafted_nodes",
                  "merges", "accepted_merges", "draft_rows", "target_rows"):  # fmt: skip
        assert getattr(got.stats, count) == getattr(expected.stats, count), count


class NeverStops(StoppingCriteria):
    def __call__(self, input_ids, scores, **_):
        return torch.zeros(len(input_ids), dtype=torch.bool)


STAY = {
    "a processor": {"repetition_penalty": 1.3},
    "a criterion": {"stopping_criteria": [NeverStops()]},
    "a clock": {"max_time": 1000.0},
    "scores": {"output_scores": True, "return_dict_in_generate": True},
    "an observer": {"observer": lambda verified: None},
    "a string": {"stop_strings": list(CHARACTERS[3:29:4]), "tokenizer": tokenizer()},
}


@pytest.mark.parametrize("what", STAY)
def test_where_the_host_decides_it_hears_of_every_step_first(pair, flown, what, request):
    expected = text(pair, "chain", **STAY[what], **LONG)
    flown.clear()
    request.getfixturevalue("cuda")
    got = text(pair, "chain", **STAY[what], **LONG)
    assert flown and not any(flown)
    got, expected = (getattr(found, "sequences", found) for found in (got, expected))
    assert torch.equal(got, expected)


def test_an_error_is_the_step_s_and_what_is_queued_is_waited_for(pair, cuda, flown):
    expected = text(pair, "graph", **LONG)
    handle = patch(pair[0], assistant_model=pair[1])
    try:
        waits = cuda.counts["waits"]
        with pytest.raises(ConnectionError, match="the reader went away"):
            text(pair, "graph", **LONG, streamer=Streamer(fails_at=8))
        assert cuda.counts["waits"] > waits
    finally:
        unpatch(pair[0])
    del handle
    assert torch.equal(text(pair, "graph", **LONG), expected)


def test_nothing_is_picked_from_nan(pair, cuda, flown):
    """The step behind it reads some other token, and nobody hears of it."""
    whole = text(pair, "plain", **LONG)
    with torch.no_grad():
        pair[0].get_input_embeddings().weight[int(whole[0, 9 + 12])] = torch.nan
    given = Streamer()
    with pytest.raises(ValueError, match=r"NaN|not finite"):
        text(pair, "plain", 1, **LONG, streamer=given)
    assert len(given.given) > 5 and given.given[-1] != "end"
