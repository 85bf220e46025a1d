"""What an engine keeps, for whom, how much of it, and until when."""

from __future__ import annotations

import functools
import gc
import weakref
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

import gsd_kernels as gsd
from gsd_kernels import DraftHeads, LayerSkip
from gsd_kernels_hf.engine.engine import MOST_SESSIONS, engines_of
from gsd_kernels_hf.engine.session import Session
from gsd_kernels_hf.model.cache import GraphCache, GraphLayer


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def objects(monkeypatch):
    """Weak references to every session, every cache, and every layer's keys that was made."""
    found: list[weakref.ref] = []

    def watch(kind: type, name: str, what: Any) -> None:
        own = getattr(kind, name)

        def call(self, *args, **kwargs):
            result = own(self, *args, **kwargs)
            found.append(weakref.ref(what(self)))
            return result

        monkeypatch.setattr(kind, name, call)

    watch(Session, "__init__", lambda self: self)
    watch(GraphCache, "__init__", lambda self: self)
    watch(GraphLayer, "lazy_initialization", lambda self: self.keys)
    watch(GraphCache, "grow", lambda self: self.layers[0].keys)
    return found


def alive(objects: list[weakref.ref]) -> list[Any]:
    return [type(ref()).__name__ for ref in objects if ref() is not None]


def counted(objects: list[weakref.ref], cuda: fake_cuda.FakeCuda, call: Any) -> tuple[int, int]:
    """Objects that a call makes and keeps (those of a proof, at a change alone, die), and its captures."""
    before = len(objects), cuda.counts["captures"]
    call()
    return len(alive(objects[before[0] :])), cuda.counts["captures"] - before[1]


@pytest.mark.parametrize("name", chats.each())
def test_the_second_call_of_a_bucket_makes_nothing(name, objects, cuda, monkeypatch):
    target, draft = pair()
    if name == "auto":
        in_turns(monkeypatch, drafting()[0])
    with patched(target, **sources(name, target, draft)):
        made, captures = counted(objects, cuda, lambda: ask(target, words(2, 9, seed=1), tokens=30))
        assert made >= 3 and captures == GRAPHS
        for length, tokens in ((9, 30), (30, 24)):
            prompt, texts = words(2, length, seed=length), []
            want = expected(target, prompt, tokens=tokens)
            call = functools.partial(ask, target, prompt, tokens=tokens)
            assert counted(objects, cuda, lambda call=call, texts=texts: texts.append(call())) == (0, 0)
            assert torch.equal(texts[0], want)


def hooked(target, handle):
    target.model.layers[0].mlp.register_forward_hook(lambda *args: None)
    ask(target, words(2, 9, seed=1), tokens=2)
    handle.clear()


LEAVING = {
    "clear": lambda target, handle: handle.clear(),
    "unpatch": lambda target, handle: gsd.unpatch(target),
    "evicted": lambda target, handle: handle.engines.let_go(),
    "another structure": hooked,
}


@pytest.mark.parametrize(("name", "how"), chats.each("clear") + [("graph", how) for how in LEAVING if how != "clear"])
def test_memory_comes_back_at_once(name, how, objects):
    """Without waiting for the collector of cycles, which may take long; and models die."""
    target, draft = pair()
    gc.collect()
    gc.disable()
    try:
        options = sources(name, target, draft)
        with patched(target, **options) as handle:
            ask(target, words(2, 9, seed=1), tokens=30)
            ask(target, words(2, 9, seed=2), tokens=30, **SAMPLED)
            assert alive(objects)
            LEAVING[how](target, handle)
            assert not alive(objects)
    finally:
        gc.enable()
    refs = [weakref.ref(target), weakref.ref(draft)]
    del target, draft, options, handle
    gc.collect()
    assert name == "auto" or [ref() for ref in refs] == [None, None]


# Outside of a patch captured steps alone are kept, as long as their models live.


def kept(target):
    return engines_of(target).sessions


CALLS = {
    **{name: (name, {}) for name in CAPTURED},
    "sampled": ("graph", SAMPLED),
    "host": ("graph", {"repetition_penalty": 1.3}),
    "history": ("plain", {"graph_config": GRAPH, "draft_sources": ("history",)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_captures_nothing_and_reads_its_prompt_whole(name, cuda):
    """What a text leaves in the caches is a patch's to use: a caller's prompt must not speed up another's."""
    of, (which, options) = pair(), CALLS[name]
    options = sources(which, *of) | options  # the same objects in every call
    reads, first = Reads(of[0]), text(of, "plain", **options, max_new_tokens=12)
    reads.since()
    replays = cuda.counts["replays"]
    longer = text(of, "plain", **options, max_new_tokens=16)
    assert torch.equal(longer[:, : first.shape[1]], first) and reads.since() >= 2 * 8
    assert cuda.counts["captures"] == GRAPHS and cuda.counts["replays"] > replays > 0
    assert len(kept(of[0])) == 1


def test_sessions_are_few():
    target, draft = pair()
    for other in [draft, *(noised(target, seed=seed) for seed in range(MOST_SESSIONS))]:
        for rows in (1, 2) if other is draft else (1,):
            text((target, other), "chain", rows, max_new_tokens=12)
            assert len(kept(target)) <= MOST_SESSIONS
    with gsd.patch(target):
        assert not kept(target), "a patch keeps its own"


DRAFTS = {
    "models": lambda target: {"assistant_model": [noised(target), noised(target, seed=2)]},
    "layer_skip": lambda target: {"assistant_model": LayerSkip(target, mlp=[1])},
    "heads": lambda target: {"draft_heads": DraftHeads.for_model(target, 2)},
}


@pytest.mark.parametrize(
    ("name", "who"), [*((name, "draft") for name in DRAFTS), ("heads", "target"), ("layer_skip", "target")]
)
def test_no_model_is_kept_alive(name, who):
    target = pair(num_hidden_layers=3)[0]
    given = list(DRAFTS[name](target).items())
    text((target, None), "plain", **dict(given), graph_config=GRAPH, max_new_tokens=12)
    (session,) = kept(target)
    caches = weakref.ref(session)
    del session
    drafts = given[0][1] if name == "models" else [given[0][1]]
    gone = weakref.ref(target if who == "target" else drafts[-1])
    if who == "target":
        del target
    if who == "draft" or name == "layer_skip":  # which holds its model itself
        drafts.clear()
        given.clear()
    gc.collect()
    assert gone() is None and caches() is None


def test_a_running_call_returns_its_memory_when_it_ends(objects):
    target, draft = pair()
    handle = gsd.patch(target, assistant_model=draft, graph_config=GRAPH)
    prompt, steps = words(1, 9, seed=1), []

    def leave(record) -> None:
        steps.append(record)
        if len(steps) == 2:
            gsd.unpatch(target)

    want = expected(target, prompt, tokens=30)
    assert torch.equal(ask(target, prompt, tokens=30, observer=leave), want)
    steps.clear()
    gc.collect()
    assert handle.engines.cache_bytes == 0 and not alive(objects)
