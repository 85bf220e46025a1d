"""The turns of a chat: what was read is not read again, and the text is what full reading gives."""

from __future__ import annotations

import contextlib

import pytest
import torch
from chats import GRAPH, GREEDY, SAMPLED, SOURCES, TREE, Reads, ask, expected, pair, patched, sources, words
from rotated import rotated
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import gsd_kernels as gsd

SAID = 5  # tokens of a user's turn


@pytest.mark.parametrize(("name", "batch", "decoding"), rotated(SOURCES, (1, 2), (GREEDY, SAMPLED)), ids=str)
def test_later_turns_read_only_what_is_new(name, batch, decoding):
    target, draft = pair()
    reads, draft_reads = Reads(target), Reads(draft)
    text, mask = words(batch, 9, seed=1), torch.ones(batch, 9, dtype=torch.int64)
    if batch == 2:
        text[1, :4], mask[1, :4] = 0, 0
    with patched(target, **sources(name, target, draft)) as handle:
        for turn, mode in enumerate((torch.inference_mode, contextlib.nullcontext, torch.no_grad)):
            want = expected(target, text, mask, **decoding)
            reads.since(), draft_reads.since()
            held = text.shape[1] - SAID - 1 if turn else 0
            with mode():  # nothing that outlives a call is an inference tensor
                out = ask(target, text, mask, **decoding)
            assert torch.equal(out, want), turn
            assert reads.since() == batch * (text.shape[1] - 1 - held)
            if name in ("model", "graph"):
                # The draft has not read what its last step's verification emitted.
                assert draft_reads.since() <= batch * (SAID + TREE.chain_rows if turn else text.shape[1])
            text = torch.cat([out, words(batch, SAID, seed=10 + turn)], 1)
            mask = torch.cat([mask, mask.new_ones(batch, text.shape[1] - mask.shape[1])], 1)
        assert handle.stats.steps > 0


def test_the_first_token_of_a_long_prompt_does_not_wait_for_the_draft(tmp_path, monkeypatch):
    """Under ``"auto"`` the draft reads the prompt after the first token was streamed; the text is the same."""
    settings = gsd.Automatic(long_prompt_tokens=40)

    class Streamer(BaseStreamer):
        def __init__(self) -> None:
            self.read: list[int] = []

        def put(self, value) -> None:
            self.read.append(reads.since())

        def end(self) -> None: ...

    for length in (39, 40):
        monkeypatch.setenv(
            "GSD_KERNELS_CACHE", str(tmp_path / str(length))
        )  # no choice is known: the first step drafts
        target, draft = pair()
        reads, streamer, text = Reads(draft), Streamer(), words(1, length, seed=length)
        out = gsd.generate(
            target, text, assistant_model=draft, graph_config=settings, max_new_tokens=8, streamer=streamer
        )
        assert torch.equal(out, expected(target, text, tokens=8))
        prompt, first, *rest = streamer.read
        assert prompt == 0 and (first == 0) == (length == 40) and sum(rest) + first >= length - 1


PROMPTS = {
    "part": lambda text: torch.cat([text[:, :6], words(1, 9, seed=7)], 1),
    "last token alone differs": lambda text: torch.cat([text[:, :-1], (text[:, -1:] - 2) % 90 + 3], 1),
    "first token differs": lambda text: torch.cat([(text[:, :1] - 2) % 90 + 3, text[:, 1:]], 1),
    "strict prefix": lambda text: text[:, :7],
    "one token": lambda text: text[:, :1],
    "two tokens": lambda text: text[:, :2],
    "equal": lambda text: text,
    "all but the last": lambda text: text[:, :-1],
    "longer": lambda text: torch.cat([text, words(1, 300, seed=7)], 1),
}


CASES = [("graph", kind, GREEDY) for kind in PROMPTS]
CASES += [("layer_skip", "part", SAMPLED), ("graph", "equal", SAMPLED), ("layer_skip", "longer", GREEDY)]


@pytest.mark.parametrize(("name", "kind", "decoding"), CASES, ids=range(len(CASES)))
def test_prompts_that_share_something(name, kind, decoding):
    target, draft = pair()
    reads = Reads(target)
    with patched(target, **sources(name, target, draft)):
        text = ask(target, words(1, 9, seed=1), **decoding)
        prompt = PROMPTS[kind](text)
        shared = min(prompt.shape[1] - 1, text.shape[1] - 1)
        while shared and not torch.equal(prompt[:, :shared], text[:, :shared]):
            shared -= 1
        want = expected(target, prompt, **decoding)
        reads.since()
        assert torch.equal(ask(target, prompt, **decoding), want)
        assert reads.since() == prompt.shape[1] - 1 - shared
        again = torch.cat([want, words(1, 3, seed=9)], 1)
        assert torch.equal(ask(target, again, **decoding), expected(target, again, **decoding))


def test_a_text_that_was_returned_stays_while_its_storage_is_used_again():
    target, draft = pair()
    with patched(target, assistant_model=draft, graph_config=TREE):
        text = ask(target, words(1, 12, seed=1))
        before = text.clone()
        assert not torch.equal(ask(target, words(1, 12, seed=2)), text)
        assert torch.equal(text, before)


class Breaking(BaseStreamer):
    def __init__(self, after: int) -> None:
        self.left = after

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise InterruptedError("enough")

    def end(self):
        pass


@pytest.mark.parametrize("after", [0, 1, 6])
def test_a_call_that_broke_off_leaves_nothing_behind(after):
    target, draft = pair()
    with patched(target, assistant_model=draft, graph_config=GRAPH) as handle:
        text = torch.cat([ask(target, words(1, 9, seed=1)), words(1, SAID, seed=2)], 1)
        want = expected(target, text)
        with pytest.raises(InterruptedError):
            ask(target, text, streamer=Breaking(after))
        assert handle.engines.cache_bytes == 0, "its session is not used again"
        for _ in range(2):
            assert torch.equal(ask(target, text), want)


class Forbid(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores.scatter_(1, input_ids[:, -1:], -torch.inf)
        scores[:, 11::3] -= 1.0
        return scores


class StopAt(StoppingCriteria):
    """Stops a sequence by a property of its last token, others go on: faster sequences take tokens back."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] % 7 == 0) & (torch.arange(len(input_ids)) == input_ids.shape[1] % 2)


@pytest.mark.parametrize("decoding", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
def test_calls_with_processors_and_criteria_in_between(batch, decoding):
    target, draft = pair()
    extras = [
        {},
        {"logits_processor": LogitsProcessorList([Forbid()])},
        {},
        {"stopping_criteria": StoppingCriteriaList([StopAt()])},
        {"output_scores": True, "return_dict_in_generate": True},
    ]
    for order in ((0, 1, 2), (0, 3, 2), (1, 3, 4), (3, 0, 3)):
        with patched(target, assistant_model=draft, graph_config=GRAPH):
            text = words(batch, 7, seed=sum(order))
            for turn in order:
                want = expected(target, text, tokens=6, **extras[turn], **decoding)
                out = ask(target, text, tokens=6, **extras[turn], **decoding)
                want, out = (found if isinstance(found, torch.Tensor) else found.sequences for found in (want, out))
                assert torch.equal(out, want), (order, turn)
                text = torch.cat([out, words(batch, 2, seed=turn)], 1)


@pytest.mark.slow
def test_seeds_have_noise_of_their_own_in_a_session_that_was_used():
    """The same drawn text whether the seed is the session's first or a later one."""
    target, draft = pair()
    prompt = words(1, 9, seed=1)
    for criterion, shape in (("exact", GRAPH), ("speculative", "chain")):
        options = {**SAMPLED, "criterion": criterion, "graph_config": shape, "assistant_model": draft}
        alone = {}
        for seed in (5, 6, 7):
            with patched(target):
                alone[seed] = ask(target, prompt, **{**options, "seed": seed})
        with patched(target):
            for seed in (5, 6, 7, 5):
                assert torch.equal(ask(target, prompt, **{**options, "seed": seed}), alone[seed]), (criterion, seed)
        assert len({tuple(text[0].tolist()) for text in alone.values()}) == 3


def test_the_drafts_of_speculative_sampling_depend_on_the_seed():
    target, draft = pair()
    drafted = {}
    for seed in (5, 6, 7, 8):
        seen: list[int] = []
        gsd.generate(
            target,
            words(1, 9, seed=1),
            attention_mask=torch.ones(1, 9, dtype=torch.int64),
            assistant_model=draft,
            criterion="speculative",
            max_new_tokens=2,
            pad_token_id=0,
            observer=lambda record, seen=seen: seen.extend(record.rows.token_ids[0, 1:].tolist()),
            **{**SAMPLED, "temperature": 3.0, "seed": seed},
        )
        drafted[seed] = tuple(seen[:2])
    assert len(set(drafted.values())) > 1
