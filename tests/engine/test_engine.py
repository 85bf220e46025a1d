"""What an engine keeps, for whom, how much of it, and until when."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import chats
import fake_cuda
import pytest
import torch
from chats import GRAPH, SAMPLED, TREE, ask, both, expected, pair, patched, sources, words
from engine.capturing import drafting, in_turns
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import gsd_kernels as gsd
from gsd_kernels_hf.engine import capture
from gsd_kernels_hf.engine import engine as rooms
from gsd_kernels_hf.engine.decoder import GraphDecoder
from gsd_kernels_hf.engine.session import Session
from gsd_kernels_hf.model.cache import GraphCache, GraphLayer


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def made(monkeypatch, cuda):
    """Counts sessions, caches, the storage of layers, and captures."""
    counts: Counter[str] = cuda.counts

    def counted(kind: type, name: str) -> None:
        own = getattr(kind, name)

        def call(self, *args, **kwargs):
            counts[f"{kind.__name__}.{name}"] += 1
            return own(self, *args, **kwargs)

        monkeypatch.setattr(kind, name, call)

    counted(Session, "__init__")
    counted(GraphLayer, "lazy_initialization")
    counted(GraphLayer, "grow")
    return counts


def allocations(counts: Counter[str]) -> int:
    return counts["GraphLayer.lazy_initialization"] + counts["GraphLayer.grow"] + counts["Session.__init__"]


def after(made: Counter[str], call: Callable[[], Any]) -> tuple[int, int]:
    """Allocations of caches and sessions, and captures, in a call. (The probe's cache is made at a change alone.)"""
    before = allocations(made), made["captures"]
    call()
    return allocations(made) - before[0], made["captures"] - before[1]


@pytest.mark.parametrize("name", chats.each())
def test_the_second_call_of_a_bucket_makes_nothing(name, made, monkeypatch):
    target, draft = pair()
    if name == "auto":
        in_turns(monkeypatch, drafting()[0])
    with patched(target, **sources(name, target, draft)):
        first = after(made, lambda: ask(target, words(2, 9, seed=1), tokens=30))
        assert first[0] >= 3 and first[1] == 2, "two graphs in turns"
        for length, tokens in ((9, 30), (30, 24), (4, 40)):
            prompt = words(2, length, seed=length)
            want = expected(target, prompt, tokens=tokens)
            texts: list[torch.Tensor] = []
            call = functools.partial(ask, target, prompt, tokens=tokens)
            assert after(made, lambda call=call, texts=texts: texts.append(call())) == (0, 0)
            assert torch.equal(texts[0], want) and made["replays"] > 0


@pytest.mark.slow
def test_another_bucket_grows_and_captures_anew(made):
    target, draft = pair()
    with patched(target, assistant_model=draft, graph_config=GRAPH) as handle:
        ask(target, words(1, 9, seed=1), tokens=30)
        bytes_before = handle.engines.cache_bytes
        text, captures = words(1, 9, seed=1), made["captures"]
        for turn in range(4):
            text = torch.cat([ask(target, text, tokens=30), words(1, 66, seed=turn)], 1)
        assert torch.equal(ask(target, text, tokens=30), expected(target, text, tokens=30))
        assert made["Session.__init__"] == 1
        assert made["GraphLayer.grow"] == 4, "393 positions are the second bucket of two models of two layers"
        assert made["captures"] == captures + 2
        assert handle.engines.cache_bytes == 2 * bytes_before
        assert after(made, lambda: ask(target, words(1, 9, seed=5), tokens=30)) == (0, 0)


@pytest.mark.slow
def test_what_has_a_session_of_its_own(made):
    target, draft = pair()
    with patched(target, assistant_model=draft, graph_config=GRAPH):
        text = words(1, 9, seed=1)
        ask(target, text)
        for options in (SAMPLED, {**SAMPLED, "temperature": 0.5}, {"eos_token_id": 14}):
            want, before = expected(target, text, **options), made["Session.__init__"]
            for _ in range(2):
                assert torch.equal(ask(target, text, **options), want)
            assert made["Session.__init__"] == before + 1, options
        before = made["Session.__init__"]
        ask(target, words(3, 9, seed=1))
        assert made["Session.__init__"] == before + 1
        ask(target, text, **{**SAMPLED, "temperature": 0.5, "seed": 9})
        assert made["Session.__init__"] == before + 1, "another seed needs none"


@pytest.mark.slow
def test_few_sessions_wait(made):
    """Of all engines together, whatever was asked for in between."""
    target, draft = pair()
    drafts = [pair(seed=i)[1] for i in range(3)]
    with patched(target, assistant_model=draft, graph_config=TREE) as handle:
        for batch in range(1, 4):
            for other in (draft, *drafts):
                prompt = words(batch, 5, seed=batch)
                assert torch.equal(
                    ask(target, prompt, assistant_model=other, tokens=4), expected(target, prompt, tokens=4)
                )
                assert len(handle.engines.idle.sessions) <= rooms.MOST_SESSIONS
        kept = handle.engines.idle.sessions
        assert len(kept) == rooms.MOST_SESSIONS and {s.key.batch for s in kept} == {3}, "the latest ones"
        assert handle.engines.cache_bytes == sum(s.cache_bytes for s in kept) > 0
        for i in range(rooms.MOST_ENGINES + 2):
            ask(target, words(1, 5, seed=1), criterion=gsd.Typical(0.1 + i / 100), tokens=2)
        assert len(list(handle.engines)) == rooms.MOST_ENGINES


@pytest.fixture
def objects(monkeypatch):
    """Weak references to every session, every cache, and every layer's keys."""
    found: list[weakref.ref] = []
    session, cache, layer = Session.__init__, GraphCache.__init__, GraphLayer.lazy_initialization

    def watch(kind: type, name: str, own: Callable[..., Any], what: Callable[[Any], Any]) -> None:
        def call(self, *args, **kwargs):
            own(self, *args, **kwargs)
            found.append(weakref.ref(what(self)))

        monkeypatch.setattr(kind, name, call)

    watch(Session, "__init__", session, lambda self: self)
    watch(GraphCache, "__init__", cache, lambda self: self)
    watch(GraphLayer, "lazy_initialization", layer, lambda self: self.keys)
    return found


def alive(objects: list[weakref.ref]) -> list[Any]:
    return [type(ref()).__name__ for ref in objects if ref() is not None]


@pytest.mark.parametrize(
    ("name", "how"),
    chats.each("clear") + [("graph", how) for how in ("unpatch", "evicted", "structure")],
)
def test_memory_comes_back_at_once(name, how, objects, monkeypatch):
    """Without waiting for the collector of cycles, which may take long."""
    target, draft = pair()
    gc.collect()
    objects.clear()
    gc.disable()
    try:
        with patched(target, **sources(name, target, draft)) as handle:
            ask(target, words(2, 9, seed=1), tokens=30)
            ask(target, words(2, 9, seed=2), tokens=30, **SAMPLED)
            assert alive(objects)
            if how == "clear":
                handle.clear()
            elif how == "unpatch":
                gsd.unpatch(target)
            elif how == "evicted":
                handle.engines.idle.keep_only([])
            else:
                target.model.layers[0].mlp.register_forward_hook(lambda *args: None)
                ask(target, words(2, 9, seed=1), tokens=2)
                ask(target, words(2, 9, seed=1), tokens=2, **SAMPLED)
                handle.clear()
            assert not alive(objects)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", chats.each())
def test_what_a_call_outside_a_patch_keeps_goes_at_once(name, objects, monkeypatch):
    """Captured steps and their storage go when the target's sessions do, again without the collector of cycles."""
    target, draft = pair()
    options = sources(name, target, draft)
    gc.collect()
    objects.clear()
    gc.disable()
    try:
        out = gsd.generate(target, words(1, 9, seed=1), max_new_tokens=20, pad_token_id=0, **options)
        assert objects and alive(objects)
        with gsd.patch(target):
            assert not alive(objects)
    finally:
        gc.enable()
    assert out.shape == (1, 29)


@pytest.mark.parametrize(
    ("name", "how"),
    [case for case in chats.each("patched") if case.values[0] != "auto"]
    + [("graph", how) for how in ("cleared", "unpatched")],
)
def test_models_die(name, how, objects):
    target, draft = pair()
    refs = [weakref.ref(target), weakref.ref(draft)]
    options = sources(name, target, draft)
    handle = gsd.patch(target, **options)
    for _ in range(2):
        ask(target, words(1, 9, seed=1))
    if how == "cleared":
        handle.clear()
    if how == "unpatched":
        gsd.unpatch(target)
    del handle, target, options
    gc.collect()
    assert refs[0]() is None and not alive(objects)
    del draft
    gc.collect()
    assert refs[1]() is None


def test_a_draft_of_one_call_dies():
    target, draft = pair()
    ref = weakref.ref(draft)
    gsd.generate(target, words(1, 9, seed=1), assistant_model=draft, graph_config=TREE, max_new_tokens=6)
    with patched(target) as handle:
        ask(target, words(1, 9, seed=1), assistant_model=draft, graph_config=TREE)
        del draft
        gc.collect()
        assert ref() is not None, "its session waits for another call"
        handle.clear()
        gc.collect()
        assert ref() is None


def test_a_running_call_returns_its_memory_when_it_ends(objects):
    target, draft = pair()
    handle = gsd.patch(target, assistant_model=draft, graph_config=GRAPH)
    prompt, steps = words(1, 9, seed=1), []

    def leave(record) -> None:
        steps.append(record.tokens.clone())
        if len(steps) == 2:
            gsd.unpatch(target)

    want = expected(target, prompt, tokens=30)
    assert torch.equal(ask(target, prompt, tokens=30, observer=leave), want)
    assert handle.engines.cache_bytes == 0
    gc.collect()
    assert not alive(objects)


class Outside(TorchDispatchMode):
    """The storage that a step reads and that was made before it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: set[int] = set()
        self.kept: list[torch.Tensor] = []  # so that no address is used twice
        self.read: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in fake_cuda.tensors_of((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.inside:
                self.read.setdefault(storage._cdata, StorageWeakRef(storage))
        out = func(*args, **(kwargs or {}))
        for tensor in fake_cuda.tensors_of(out):
            if tensor.untyped_storage()._cdata not in self.read:
                self.inside.add(tensor.untyped_storage()._cdata)
                self.kept.append(tensor)
        return out


READ = [*chats.each({}), *chats.each(SAMPLED)]
READ += [pytest.param("chain", {**SAMPLED, "criterion": "speculative"})]


@pytest.mark.parametrize(
    ("name", "decoding"), READ, ids=lambda given: given if isinstance(given, str) else "drawn" if given else "greedy"
)
def test_what_a_captured_step_reads_lives_on(name, decoding, monkeypatch):
    """A graph holds addresses: later calls must put what is new at the same places."""
    target, draft = pair()
    options = {"assistant_model": draft, "graph_config": name}
    if name != "chain":
        options = sources(name, target, draft)
    if name == "auto":
        in_turns(monkeypatch, drafting()[0])
    monkeypatch.setattr(capture, "can_capture", lambda session: False)  # each step is watched
    seen: list[Outside] = []
    step = Session.step

    def watching(self):
        if len(seen) == 4:
            return step(self)
        with Outside() as mode:
            seen.append(mode)
            return step(self)

    with patched(target, **options):
        ask(target, words(1, 9, seed=1), tokens=20, **decoding)
        monkeypatch.setattr(Session, "step", watching)
        ask(target, words(1, 9, seed=2), tokens=20, **decoding)
        ask(target, words(1, 12, seed=3), tokens=20, **{**decoding, **({"seed": 8} if decoding else {})})
        ask(target, words(1, 12, seed=4), tokens=20, **decoding)
        gone = [ref for mode in seen for ref in mode.read.values() if ref.expired()]
        assert len(seen) == 4 and not gone


@pytest.mark.slow
@pytest.mark.parametrize("name", ["graph", "heads"])
def test_threads_with_batches_of_their_own(name):
    target, draft = pair()
    prompts = [(words(1 + i % 3, 6 + i, seed=i), GREEDY_OR[i % 2]) for i in range(6)]
    wanted = [expected(target, prompt, **decoding) for prompt, decoding in prompts]
    with patched(target, **sources(name, target, draft)) as handle:

        def work(thread: int) -> None:
            for i in (*range(thread, 6), *range(thread)):
                prompt, decoding = prompts[i]
                assert torch.equal(ask(target, prompt, **decoding), wanted[i]), i
                assert handle.stats.sequences == len(prompt)

        both(work)
        assert len(handle.engines.idle.sessions) <= rooms.MOST_SESSIONS


GREEDY_OR: tuple[dict[str, Any], ...] = ({}, SAMPLED)


@pytest.mark.parametrize("name", ["model", "heads"])
def test_a_forward_of_another_thread_is_no_change(name, made):
    """Configs are switched and hidden states listened for in the middle of it."""
    target, draft = pair()
    inside, done = threading.Event(), threading.Event()
    forward = target.lm_head.forward

    def slow(hidden):
        in_a_step = target.config._attn_implementation != "sdpa" and hidden.shape[1] > 1
        if threading.current_thread().name == "other" and in_a_step and not inside.is_set():
            inside.set()
            done.wait(20)
        return forward(hidden)

    target.lm_head.forward = slow
    with patched(target, **sources(name, target, draft)):
        ask(target, words(1, 9, seed=1))
        other = threading.Thread(target=lambda: ask(target, words(2, 30, seed=1), tokens=12), name="other")
        other.start()
        assert inside.wait(20)
        before = made["Session.__init__"]
        ask(target, words(1, 9, seed=1))
        done.set()
        other.join()
        assert made["Session.__init__"] == before


@pytest.mark.slow
def test_a_decoder_of_two_threads():
    target, draft = pair()
    decoder = GraphDecoder(draft, GRAPH)
    meet = threading.Barrier(2)

    def work(thread: int) -> None:
        for i in range(3):
            prompt = words(1 + thread, 6 + i, seed=i)
            out = ask(target, prompt, custom_generate=decoder, tokens=4 + thread)
            meet.wait(30)
            assert torch.equal(out, expected(target, prompt, tokens=4 + thread))
            assert (decoder.stats.sequences, decoder.stats.new_tokens) == (1 + thread, (1 + thread) * (4 + thread))

    both(work)
    assert decoder.stats is not None, "a thread that made no call sees the last call of all"
    ask(target, words(1, 5, seed=1), custom_generate=decoder, tokens=2)
    assert decoder.stats.new_tokens == 2


def test_a_copied_decoder_starts_anew():
    decoder = GraphDecoder(None)
    ask(pair()[0], words(1, 5, seed=1), custom_generate=decoder)
    assert copy.deepcopy(decoder).named == decoder.named and copy.copy(decoder).stats is None
