"""What lives from call to call, and as texts grow: turns of a chat are read once, changes between calls are noticed."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from typing import Any

import fake_cuda
import pytest
import tiny_configs
import tiny_vision
import torch
from chats import GRAPH, GREEDY, SAMPLED, SOURCES, TREE, Reads, ask, expected, pair, patched, sources, words
from models import endless, noised, prompts, rotated
from sources.drafters import dflash_config, random_dflash
from texts.covering import SUBJECTS
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import gsd_kernels as gsd
from gsd_kernels_hf.engine import session
from gsd_kernels_hf.model.recurrent import mixers

SAID = 5  # tokens of a user's turn


class Breaking(BaseStreamer):
    def __init__(self, after: int) -> None:
        self.left = after

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise InterruptedError("enough")

    def end(self):
        pass


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

    class Streamer(Breaking):
        def put(self, value):
            read.append(reads.since())

    for length in (39, 40):
        # No choice is known: the first step drafts.
        monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / str(length)))
        target, draft = pair()
        reads, read, text = Reads(draft), [], words(1, length, seed=length)
        options = {"assistant_model": draft, "graph_config": settings, "max_new_tokens": 8, "streamer": Streamer(0)}
        out = gsd.generate(target, text, **options)
        assert torch.equal(out, expected(target, text, tokens=8))
        prompt, first, *rest = read
        assert prompt == 0 and (first == 0) == (length == 40) and sum(rest) + first >= length - 1


PROMPTS = {
    "part": lambda text: torch.cat([text[:, :6], words(1, 9, seed=7)], 1),
    "last token alone differs": lambda text: torch.cat([text[:, :-1], (text[:, -1:] - 2) % 90 + 3], 1),
    "first token differs": lambda text: torch.cat([(text[:, :1] - 2) % 90 + 3, text[:, 1:]], 1),
    "one token": lambda text: text[:, :1],
    "equal": lambda text: text,
    "all but the last": lambda text: text[:, :-1],
    "longer": lambda text: torch.cat([text, words(1, 300, seed=7)], 1),
}


@pytest.mark.parametrize(("kind", "decoding"), [*((kind, GREEDY) for kind in PROMPTS), ("part", SAMPLED)], ids=str)
def test_prompts_that_share_something(kind, decoding):
    target, draft = pair()
    reads = Reads(target)
    with patched(target, assistant_model=draft, graph_config=GRAPH):
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


def test_a_call_that_broke_off_leaves_nothing_behind():
    target, draft = pair()
    with patched(target, assistant_model=draft, graph_config=GRAPH) as handle:
        text = torch.cat([ask(target, words(1, 9, seed=1)), words(1, SAID, seed=2)], 1)
        want = expected(target, text)
        with pytest.raises(InterruptedError):
            ask(target, text, streamer=Breaking(6))
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
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 7 == 0


# What is changed between two calls is noticed: the second is what a model that was never used says.


def test_adapters():
    peft = pytest.importorskip("peft")
    target, draft = pair()
    texts, text = set(), words(1, 12, seed=1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)

    def scaled(wrapped: Any) -> None:
        for module in wrapped.modules():
            if hasattr(module, "scale_layer"):
                module.scale_layer(4.0)

    with patched(target, assistant_model=draft, graph_config=GRAPH):
        ask(target, text)
        torch.manual_seed(3)
        wrapped = peft.get_peft_model(target, config).double()
        wrapped.add_adapter("other", config)
        wrapped.double()
        for change in (
            lambda: None,
            lambda: wrapped.set_adapter("other"),
            wrapped.merge_adapter,
            wrapped.unmerge_adapter,
            lambda: scaled(wrapped),
            wrapped.unload,
        ):
            change()
            want = expected(target, text)
            assert torch.equal(ask(target, text), want)
            texts.add(tuple(want[0].tolist()))
            text = torch.cat([text, words(1, 1, seed=4)], 1)
    assert len(texts) > 3


@pytest.mark.parametrize(
    "changed",
    [
        {"eos_token_id": list(range(8, 40)), "do_sample": False},  # one of them comes soon
        {"temperature": 0.5},
        {"seed": 6},
        {"do_sample": False},
        {"repetition_penalty": 1.9},
        {"tokens": 40},
        {"prefill_chunk_size": 3},
        {"logits_processor": LogitsProcessorList([Forbid()])},
        {"stopping_criteria": StoppingCriteriaList([StopAt()])},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_other_settings_of_generation(changed):
    target, draft = pair()
    with patched(target, assistant_model=draft, graph_config=GRAPH):
        text = ask(target, words(1, 12, seed=1), **SAMPLED)
        for options in (SAMPLED, {**SAMPLED, **changed}, SAMPLED):
            assert torch.equal(ask(target, text, **options), expected(target, text, **options)), options


# Storage grows with a text, between steps and without a trace in it; drafts whose positions end before it.


VOCAB, LENGTH = 41, 9
SHAPE = gsd.GraphConfig(depth=3, width=2, branch=2, max_rows=10, history_depth=2, history_width=2)


@functools.cache
def long_pair():
    target = endless(vocab_size=VOCAB, num_hidden_layers=3)
    return target, noised(target, 0.03)


def long_call(**more):
    return {**prompts(3, LENGTH, seed=2, vocab=VOCAB), "max_new_tokens": 60, "do_sample": False, **more}


def test_growth_of_captured_steps(monkeypatch):
    """From room for four tokens."""
    target, draft = long_pair()
    heads, drafts = gsd.DraftHeads.for_model(target, 2), [draft, noised(target, 0.06, seed=2)]
    options = {"assistant_model": drafts, "draft_heads": heads, "graph_config": SHAPE}
    for name in ("GRAIN_TOKENS", "FIRST_TOKENS", "FIRST_GPU_TOKENS"):
        monkeypatch.setattr(session, name, 4)
    cuda = fake_cuda.install(monkeypatch)
    assert torch.equal(gsd.generate(target, **long_call(**options)), target.generate(**long_call()))
    assert cuda.counts["captures"] > 6 and cuda.counts["replays"] > 3


def test_growth_by_less_than_a_block(monkeypatch):
    """A drafter's cache has the block's positions behind the session's, however little these become more."""
    target = long_pair()[0]
    drafter = random_dflash(dflash_config(target, block_size=16))
    shape = gsd.GraphConfig(depth=12, width=1, branch=1, max_rows=13)
    for name in ("GRAIN_TOKENS", "FIRST_TOKENS"):
        monkeypatch.setattr(session, name, 4)
    call = long_call(max_new_tokens=24)
    found = gsd.generate(target, **call, drafter=drafter, draft_sources=("drafter",), graph_config=shape)
    assert torch.equal(found, target.generate(**call))


@pytest.mark.parametrize("name", ["chain", "graph", "auto"])
def test_a_draft_is_left_out_where_its_positions_end(name, caplog):
    """A target's own end is said, and as in transformers the text goes on."""
    target = endless(vocab_size=VOCAB, max_position_embeddings=60)
    draft = noised(target, 0.03)
    config = copy.deepcopy(draft.config)
    config.max_position_embeddings = 30
    short = type(draft)(config).to(draft.dtype).eval()
    short.load_state_dict(draft.state_dict())
    shape, seen = {"graph": SHAPE}.get(name, name), []
    out = gsd.generate(
        target,
        **long_call(assistant_model=short, graph_config=shape, return_dict_in_generate=True),
        observer=lambda v: seen.append(int(v.rows.depths.max())),
    )
    assert torch.equal(out.sequences, target.generate(**long_call()))
    assert out.stats.left_out == ["model"] and (name == "auto" or out.stats.tokens_per_step > 1)
    if name == "chain":
        assert max(seen) == 5 and seen[-1] == 0, "plain behind"
    (said,) = [message for message in caplog.messages if "max_position_embeddings" in message]
    assert said == "the text goes on beyond the 60 positions that the model was made for (max_position_embeddings)"


# ``longrope``: turns of a chat on either side of the border between its factors, and across.


def test_turns_across_the_border_of_longrope():
    """What is kept of a text serves the next one as far as both are on one side; pieces before it are the short's."""
    made = SUBJECTS["longrope"].made(None)
    fresh, target, batch = made.target, copy.deepcopy(made.target), 2
    reads, text, seen = Reads(target), words(batch, 6, seed=1), []
    with patched(target, **made.drafts, graph_config="tree"):
        for turn in range(6):
            want = ask(fresh, text, tokens=4)
            reads.since()
            assert torch.equal(ask(target, text, tokens=4), want), turn
            seen.append(reads.since() // batch)
            text = torch.cat([want, words(batch, 2, seed=turn)], 1)
        assert seen[1:3] == [2, 2] and seen[-1] == 2
        for length, chunk in ((8, None), (20, 8), (29, 5), (31, 24)):
            short = words(batch, length, seed=length)  # and back to the short side
            want = ask(fresh, short, prefill_chunk_size=chunk)
            assert torch.equal(ask(target, short, prefill_chunk_size=chunk), want), length
        type(target).generate(target, text, max_new_tokens=3)  # which leaves the long factors on the module
        assert torch.equal(ask(target, short[:, :8]), ask(fresh, short[:, :8]))


# Hybrids: layers with a recurrent state, whose rows go on from the state where a text ends.


needs_states = pytest.mark.skipif(not mixers.READABLE, reason=f"states are read from transformers {mixers.FIRST} on")


@needs_states
def test_turns_go_on_from_the_state_where_the_text_ends():
    target = tiny_configs.build_hybrid("falcon-h1")
    first = tiny_configs.hybrid_inputs(1)["input_ids"]
    shape = gsd.GraphConfig(depth=0, history_depth=4)
    with gsd.patch(target, draft_sources=("history",), graph_config=shape) as handle:
        text = ask(target, first, tokens=45)
        more = torch.tensor([[7, 9, 11]])
        asked = torch.cat([text, more], 1), text, torch.cat([text[:, :25], more], 1)
        found = [ask(target, ids, tokens=20) for ids in asked]
        reused = [session.target.reused for session in handle.engines.sessions]
    assert reused == [0], "the last prompt left the text in the middle"
    for ids, answer in zip(asked, found, strict=True):
        assert torch.equal(answer, ask(target, ids, tokens=20))


PADS = (0, 1, 2, 6)  # of the sequences of a batch


@needs_states
@pytest.mark.parametrize(
    ("name", "layers", "backend", "chunk"),
    [
        ("Zaya", 2, "auto", 3),
        ("NemotronH", 4, "reference", 1),
        ("Zamba2", 4, "auto", 3),
        ("Zamba2", 4, "reference", None),
    ],
)
def test_limits_on_steps_are_those_of_transformers(name, layers, backend, chunk):
    """By window and by depth; the first row is the prompt's last token, and no piece of it a generated one."""
    limited = name != "Zaya"  # by transformers, in prompts alone
    model = tiny_configs.build(f"{name}ForCausalLM", layers, **({"time_step_min": 0.3} if limited else {}))
    for _, module in mixers.mixers_of(model) if limited else ():
        with torch.no_grad():
            module.dt_bias.copy_(torch.linspace(-4.0, 0.0, module.dt_bias.numel()))
    for length in (7, 8):  # the last one has one word, or two
        ids = words(len(PADS), length, seed=length) % (tiny_configs.VOCAB - 4)
        mask = torch.arange(length) >= torch.tensor(PADS)[:, None]
        call = {"input_ids": ids * mask, "attention_mask": mask.long(), "max_new_tokens": 6, "do_sample": False}
        options = {"draft_sources": ("history",), "graph_config": "tree", "prefill_chunk_size": chunk}
        assert torch.equal(gsd.generate(model, **call, **options, backend=backend), model.generate(**call))


# Prompts with images: the model's own forward reads them, rows of graphs follow.


LLAVA, QWEN = "LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"
SHORT = {"max_new_tokens": 16, "do_sample": False}
needs_images = pytest.mark.skipif(not tiny_vision.PREPARED, reason="an older transformers prepares them anew")


@needs_images
@pytest.mark.parametrize("name", [LLAVA, QWEN])
def test_nothing_of_an_image_is_left_for_another_call(name, caplog):
    """A placeholder at the end is left to transformers, whatever came before."""
    model, own = tiny_vision.build(name), type(tiny_vision.build(name)).generate
    image, other, ends = tiny_vision.prompts(name, 1), tiny_vision.prompts(name, 2), tiny_vision.endings(name, 0)
    text = {"input_ids": image["input_ids"].clamp(max=tiny_vision.IMAGE - 8)}
    same = {key: image[key] for key in ("input_ids", "attention_mask")}
    calls = [image, other, text, image, same, ends, tiny_vision.prompts(name, 1, 2), ends, image]
    with gsd.patch(model, graph_config="tree") as handle, caplog.at_level(logging.WARNING, "gsd_kernels"):
        for number, call in enumerate(calls):
            assert torch.equal(model.generate(**call, **SHORT), own(model, **call, **SHORT)), number
            why = handle.stats.why
            assert (f"{tiny_vision.IMAGE}], which is no word" in why) if call is ends else why is None, (number, why)
        assert handle.stats.steps < SHORT["max_new_tokens"], "the history has seen this image's text"
        reused = [session for session in handle.engines.sessions if session.key.axes is not None]
        assert reused and all(session.target.inputs is None for session in reused), "pixels are not kept"
