"""What an engine keeps, for whom, how much of it, and until when."""

from __future__ import annotations

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
from chats import (
    CAPTURED,
    GRAPH,
    GRAPHS,
    SAMPLED,
    Reads,
    ask,
    drafting,
    expected,
    in_turns,
    pair,
    patched,
    sources,
    text,
    words,
)
from models import noised
from sources.drafters import dflash_config, eagle3_config, random_dflash, random_eagle3

import gsd_kernels as gsd
from gsd_kernels import DraftHeads, GraphConfig, LayerSkip
from gsd_kernels_hf.engine.engine import MOST_SESSIONS, engines_of
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
        assert first[0] >= 3 and first[1] == GRAPHS
        for length, tokens in ((9, 30), (30, 24), (4, 40)):
            prompt = words(2, length, seed=length)
            want = expected(target, prompt, tokens=tokens)
            texts: list[torch.Tensor] = []
            call = functools.partial(ask, target, prompt, tokens=tokens)
            assert after(made, lambda call=call, texts=texts: texts.append(call())) == (0, 0)
            assert torch.equal(texts[0], want) and made["replays"] > 0


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


# Outside of a patch captured steps alone are kept, as long as their models live.


def kept(target):
    return engines_of(target).idle.sessions


CALLS = {
    **{name: (name, {}) for name in CAPTURED},
    "sampled": ("graph", SAMPLED),
    "host": ("graph", {"repetition_penalty": 1.3}),
    "history": ("plain", {"graph_config": GRAPH, "draft_sources": ("history",)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_captures_nothing(name, cuda):
    of, (which, options) = pair(), CALLS[name]
    options = sources(which, *of) | options  # the same objects in every call
    first = text(of, "plain", **options, max_new_tokens=12)
    replays = cuda.counts["replays"]
    longer = text(of, "plain", **options, max_new_tokens=16)
    assert torch.equal(longer[:, : first.shape[1]], first)
    assert cuda.counts["captures"] == GRAPHS and cuda.counts["replays"] > replays > 0
    assert len(kept(of[0])) == 1


def test_every_prompt_is_read_whole():
    """What a text leaves in the caches is a patch's to use: a caller's prompt must not speed up another's."""
    of = pair()
    reads = Reads(of[0])
    for _ in range(2):
        text(of, "graph", max_new_tokens=8)
        assert reads.since() >= 8
    assert len(kept(of[0])) == 1


def test_sessions_are_few():
    target, draft = pair()
    for other in [draft, *(noised(target, seed=seed) for seed in range(MOST_SESSIONS))]:
        for rows in (1, 2) if other is draft else (1,):
            text((target, other), "chain", rows, max_new_tokens=12)
            assert len(kept(target)) <= MOST_SESSIONS
    engines = [engine for engine, _ in engines_of(target).idle._kept]
    assert len(set(map(id, engines))) == len(engines), "one of every set of sources"
    gsd.patch(target)
    assert not kept(target), "a patch keeps its own"
    gsd.unpatch(target)


DRAFTS = {
    "model": lambda target: {"assistant_model": noised(target)},
    "models": lambda target: {"assistant_model": [noised(target), noised(target, seed=2)]},
    "layer_skip": lambda target: {"assistant_model": LayerSkip(target, mlp=[1])},
    "heads": lambda target: {"draft_heads": DraftHeads.for_model(target, 2)},
    "eagle3": lambda target: {"drafter": random_eagle3(eagle3_config(target))},
    "dflash": lambda target: {"drafter": random_dflash(dflash_config(target))},
}


@pytest.mark.parametrize(
    ("name", "who"), [*((name, "draft") for name in DRAFTS), ("model", "target"), ("layer_skip", "target")]
)
def test_no_model_is_kept_alive(name, who):
    target = chats.pair(num_hidden_layers=3)[0]
    options = {
        "graph_config": GraphConfig.preset("chain", depth=2) if name == "dflash" else GRAPH,
        **DRAFTS[name](target),
    }
    (given,) = (value for option, value in options.items() if option != "graph_config")
    text((target, None), "plain", **options, max_new_tokens=12)
    (session,) = kept(target)
    caches = weakref.ref(session)
    del session
    models = given if isinstance(given, list) else [given]
    gone = weakref.ref(target if who == "target" else models[-1])
    if who == "draft":
        models.clear()
        del given, options
    else:
        del target
        if name == "layer_skip":  # which holds its model itself
            del given, options, models
    gc.collect()
    assert gone() is None and caches() is None
