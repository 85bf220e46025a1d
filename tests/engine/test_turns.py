"""What lives from call to call, and as texts grow: turns of a chat are read once, changes between calls are noticed."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from typing import Any

import fake_cuda
import models
import pytest
import tiny_configs
import torch
from chats import GRAPH, GREEDY, SAMPLED, SOURCES, TREE, Reads, ask, expected, pair, patched, sources, words
from models import endless, noised, prompts, rotated
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import gsd_kernels as gsd
from gsd_kernels_hf import validate
from gsd_kernels_hf.engine import room
from gsd_kernels_hf.engine.session import Session
from gsd_kernels_hf.validate.calls import check_inputs

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


@pytest.mark.parametrize("after", [0, 6])
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


@pytest.mark.parametrize(("batch", "decoding"), [(1, SAMPLED), (3, GREEDY), (3, SAMPLED)], ids=str)
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


# What is changed between two calls is noticed: the second is what a model that was never used says.


def add_in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.add_(0.3)


def test_adapters():
    peft = pytest.importorskip("peft")
    target, draft = pair()
    texts = set()

    def check() -> None:
        nonlocal text
        want = expected(target, text)
        assert torch.equal(ask(target, text), want)
        texts.add(tuple(want[0].tolist()))
        text = torch.cat([text, words(1, 1, seed=4)], 1)

    def adapter() -> Any:
        return peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)

    with patched(target, assistant_model=draft, graph_config=GRAPH):
        text = words(1, 12, seed=1)
        check()
        torch.manual_seed(3)
        wrapped = peft.get_peft_model(target, adapter()).double()
        check()
        wrapped.add_adapter("other", adapter())
        wrapped.double()
        check()
        wrapped.set_adapter("other")
        check()
        with wrapped.disable_adapter():
            check()
        check()
        wrapped.merge_adapter()
        check()
        wrapped.unmerge_adapter()
        check()
        wrapped.set_adapter("default")
        check()
        wrapped.base_model.scaling = None
        for module in wrapped.modules():
            if hasattr(module, "scale_layer"):
                module.scale_layer(4.0)
        check()
        wrapped.unload()
        check()
    assert len(texts) > 3


@pytest.mark.parametrize(
    "changed",
    [
        {"eos_token_id": list(range(8, 40)), "do_sample": False},  # one of them comes soon
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.5},
        {"seed": 6},
        {"do_sample": False},
        {"repetition_penalty": 1.9},
        {"tokens": 3},
        {"tokens": 40},
        {"prefill_chunk_size": 3},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_other_settings_of_generation(changed):
    target, draft = pair()
    with patched(target, assistant_model=draft, graph_config=GRAPH):
        text = ask(target, words(1, 12, seed=1), **SAMPLED)
        for options in (SAMPLED, {**SAMPLED, **changed}, SAMPLED):
            assert torch.equal(ask(target, text, **options), expected(target, text, **options)), options


def test_a_change_in_the_middle_of_a_text():
    """Keys of the first half are of other weights; the next call must not begin with them."""
    target, draft = pair()
    calls = []

    def change(record) -> None:
        calls.append(record)
        if len(calls) == 2:
            add_in_place(target)

    with patched(target, assistant_model=draft, graph_config=GRAPH):
        text = torch.cat([ask(target, words(1, 12, seed=1), observer=change, tokens=20), words(1, 4, seed=2)], 1)
        assert len(calls) > 2
        assert torch.equal(ask(target, text), expected(target, text))


def test_what_is_not_noticed_is_forgotten_by_hand():
    """A single element through ``.data`` changes neither a counter nor a sampled element; see model/identity.py."""
    target, draft = pair()
    reads = Reads(target)
    with patched(target, assistant_model=draft, graph_config=GRAPH) as handle:
        text = torch.cat([ask(target, words(1, 12, seed=1)), words(1, 4, seed=2)], 1)
        target.model.layers[0].self_attn.k_proj.weight.data[3, 5] += 40.0
        reads.since()
        ask(target, text)
        assert reads.since() == 4
        handle.clear()
        assert torch.equal(ask(target, text), expected(target, text))


# Storage grows with a text, between steps and without a trace in it; lengths beyond the model's positions.


VOCAB = 41
SHAPE = gsd.GraphConfig(depth=3, width=2, branch=2, max_rows=10, history_depth=2, history_width=2)
LENGTH, NEW = 9, 60


@functools.cache
def long_pair():
    target = endless(vocab_size=VOCAB, num_hidden_layers=3)
    return target, noised(target, 0.03)


def long_call(**more):
    return {**prompts(3, LENGTH, seed=2, vocab=VOCAB), "max_new_tokens": NEW, "do_sample": False, **more}


@pytest.fixture
def small(monkeypatch):
    """Room for four tokens at first; the capacities of the sessions that grew."""
    grown: list[int] = []
    honest = Session.grow

    def grow(self, capacity):
        honest(self, capacity)
        grown.append(self.capacity)

    monkeypatch.setattr(room, "GRAIN_TOKENS", 4)
    monkeypatch.setattr(room, "FIRST_TOKENS", 4)
    monkeypatch.setattr(room, "FIRST_GPU_TOKENS", 4)
    monkeypatch.setattr(Session, "grow", grow)
    return grown


@functools.cache
def long_text(sampled: bool, penalty: float) -> torch.Tensor:
    target = long_pair()[0]
    if sampled:
        return gsd.generate(target, **long_call(repetition_penalty=penalty) | SAMPLED)
    return target.generate(**long_call(repetition_penalty=penalty))


def test_growth_of_captured_steps(small, monkeypatch):
    target, draft = long_pair()
    heads, drafts = gsd.DraftHeads.for_model(target, 2), [draft, noised(target, 0.06, seed=2)]
    options = {"assistant_model": drafts, "draft_heads": heads, "graph_config": SHAPE}
    wanted = gsd.generate(target, **long_call(**options))
    small.clear()
    cuda = fake_cuda.install(monkeypatch)
    assert torch.equal(gsd.generate(target, **long_call(**options)), wanted)
    assert cuda.counts["captures"] > 1 and cuda.counts["replays"] > 3 and len(small) > 1


@functools.cache
def of_few_positions(positions: int = 40):
    target = endless("qwen3", vocab_size=VOCAB, max_position_embeddings=positions)
    return target, noised(target, 0.01)


def warnings_of(caplog) -> list[str]:
    return [r.message for r in caplog.records if "max_position_embeddings" in r.message]


@pytest.mark.parametrize("options", [{}, {"draft_sources": ("history",)}, {"graph_config": SHAPE}, "draft"])
def test_a_text_beyond_the_models_positions_is_transformers(options, caplog):
    target, draft = of_few_positions()
    if options == "draft":
        options = {"assistant_model": draft}
    elif "graph_config" in options:
        options = options | {"assistant_model": draft}
    wanted = target.generate(**long_call())
    assert wanted.shape[1] == LENGTH + NEW > 40
    with caplog.at_level(logging.WARNING, logger="gsd_kernels"):
        assert torch.equal(gsd.generate(target, **long_call(**options)), wanted)
    assert warnings_of(caplog) == [
        "the text goes on beyond the 40 positions that the model was made for (max_position_embeddings)"
    ]


@functools.cache
def short_draft(positions: int = 30):
    """A draft with fewer positions than the target of :func:`long_pair`."""
    _, draft = long_pair()
    config = copy.deepcopy(draft.config)
    config.max_position_embeddings = positions
    short = type(draft)(config).to(draft.dtype).eval()
    short.load_state_dict(draft.state_dict())
    return short


OUTGROWN = {
    "chain": {"graph_config": "chain"},
    "graph and history": {"graph_config": SHAPE},
    "lookups": {"graph_config": gsd.GraphConfig(depth=4, max_path=2), "draft_sources": ("model", "history")},
    "auto": {},
    "auto, model alone": {"draft_sources": ("model",)},
}


@pytest.mark.parametrize(
    ("name", "more"),
    [(name, ({}, SAMPLED, {"repetition_penalty": 1.1})[i % 3]) for i, name in enumerate(OUTGROWN)],
    ids=str,
)
def test_a_draft_is_left_out_where_its_positions_end(name, more):
    target, _ = long_pair()
    options = long_call(**OUTGROWN[name], assistant_model=short_draft(), return_dict_in_generate=True) | more
    seen = []
    out = gsd.generate(target, **options, observer=lambda v: seen.append(int(v.rows.depths.max())))
    assert torch.equal(out.sequences, long_text("do_sample" in more, more.get("repetition_penalty", 1.0)))
    assert out.stats.left_out == ["model"] and (name.startswith("auto") or out.stats.tokens_per_step > 1)
    if name == "chain":
        assert max(seen) == 5 and seen[-1] == 0, "plain behind"
        assert sum(depth == 0 for depth in seen) > 8


# ``longrope``: prompts in pieces and turns of a chat on either side of the border between its factors, and across.


SIDED_VOCAB, ORIGINAL = 40, 24
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0, 1.3, 1.1, 1.7],
    "long_factor": [3.0, 9.0, 5.0, 20.0],
}


@functools.lru_cache
def sided():
    """A model of which other factors give other texts, and a draft."""
    sizes = {"vocab_size": SIDED_VOCAB, "num_attention_heads": 4, "max_position_embeddings": 96}
    target = models.endless(**sizes, rope_parameters=ROPE)
    return target, models.noised(target, 0.02)


def sided_prompt(length: int, batch: int = 1, *, seed: int = 3):
    return models.prompts(batch, length, seed=seed, vocab=SIDED_VOCAB)


@pytest.mark.parametrize(("length", "chunk"), [(20, 8), (29, 5), (31, 24)])
def test_a_prompt_in_pieces(length, chunk):
    """transformers turns the pieces before the border by the short factors."""
    target, draft = sided()
    call = {**sided_prompt(length), "max_new_tokens": 8, "do_sample": False, "prefill_chunk_size": chunk}
    out = gsd.generate(target, **call, assistant_model=draft, graph_config="tree")
    assert torch.equal(out, target.generate(**call))


def test_later_turns_of_a_chat():
    """What is kept of a text serves the next one as far as both are on one side."""
    target, draft = sided()
    fresh, target = target, copy.deepcopy(target)
    batch = 2
    reads, text, seen = Reads(target), sided_prompt(6, batch, seed=1)["input_ids"], []
    with patched(target, assistant_model=draft, graph_config="tree"):
        for turn in range(6):
            want = ask(fresh, text, tokens=4)
            reads.since()
            assert torch.equal(ask(target, text, tokens=4), want), turn
            seen.append(reads.since() // batch)
            text = torch.cat([want, words(batch, 2, seed=turn) % SIDED_VOCAB], 1)
        assert seen[:3] == [5, 2, 2] and seen[-1] == 2
        short = sided_prompt(8, batch, seed=9)["input_ids"]  # and back to the short side
        assert torch.equal(ask(target, short), ask(fresh, short))
        type(target).generate(target, text, max_new_tokens=3)  # which leaves the long factors on the module
        assert torch.equal(ask(target, short), ask(fresh, short))


def test_what_has_other_sides_is_refused_by_name():
    """PhiMoE scales by the side as well, and takes the short frequencies on both."""
    target = tiny_configs.build("PhimoeForCausalLM", 2)
    rope = {**ROPE, "short_mscale": 1.1, "long_mscale": 1.3, "original_max_position_embeddings": ORIGINAL}
    factors = {name: [1.5] * (target.model.rotary_emb.inv_freq.numel()) for name in ("short_factor", "long_factor")}
    config = copy.deepcopy(target.config)
    config.rope_parameters = {**rope, **factors}
    target = type(target)(config).eval()
    with pytest.raises(validate.Unsupported, match="longrope of which the sides differ in more than"):
        gsd.generate(target, **sided_prompt(6), max_new_tokens=4)


def test_images_are_refused_by_name():
    class Inputs:
        unread = ("pixel_values",)

    with pytest.raises(validate.Unsupported, match=r"pixel_values: .*longrope"):
        check_inputs(sided()[0], Inputs(), torch.zeros(1))
