"""Calls outside a patch keep captured steps, as long as their models live; shown on a CPU taken for a GPU."""

from __future__ import annotations

import gc
import weakref

import fake_cuda
import pytest
import torch
from chats import Reads, sources
from engine.capturing import CAPTURED, SAMPLED, text
from models import noised, tiny
from sources.drafters import dflash_config, eagle3_config, random_dflash, random_eagle3

from gsd_kernels import DraftHeads, GraphConfig, LayerSkip, patch, unpatch
from gsd_kernels_hf.engine.engine import MOST_SESSIONS, engines_of

GRAPH = GraphConfig(depth=3, width=2, branch=2, max_rows=8, history_depth=2)


@pytest.fixture
def pair():
    target = tiny(num_hidden_layers=3)
    return target, noised(target)


def kept(target):
    return engines_of(target).idle.sessions


CALLS = {
    **{name: (name, {}) for name in CAPTURED},
    "sampled": ("graph", SAMPLED),
    "host": ("graph", {"repetition_penalty": 1.3}),
    "history": ("plain", {"graph_config": GRAPH, "draft_sources": ("history",)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_captures_nothing(pair, name, request):
    which, options = CALLS[name]
    expected = [text(pair, which, **options, max_new_tokens=count) for count in (12, 16)]
    cuda = request.getfixturevalue("cuda")
    options = sources(which, *pair) | options  # the same objects in every call
    for count, want in zip((12, 16), expected, strict=True):
        before = cuda.counts["replays"]
        assert torch.equal(text(pair, "plain", **options, max_new_tokens=count), want)
        assert cuda.counts["captures"] == 2 and cuda.counts["replays"] > before
    assert len(kept(pair[0])) == 1


@pytest.fixture
def cuda(monkeypatch):
    return fake_cuda.install(monkeypatch)


def test_every_prompt_is_read_whole(pair, cuda):
    """What a text leaves in the caches is a patch's to use: a caller's prompt must not speed up another's."""
    reads = Reads(pair[0])
    for _ in range(2):
        text(pair, "graph", max_new_tokens=8)
        assert reads.since() >= 8
    assert len(kept(pair[0])) == 1


def test_sessions_are_few(pair, cuda):
    for draft in [pair[1], *(noised(pair[0], seed=seed) for seed in range(MOST_SESSIONS))]:
        for rows in (1, 2) if draft is pair[1] else (1,):
            text((pair[0], draft), "chain", rows, max_new_tokens=12)
            assert len(kept(pair[0])) <= MOST_SESSIONS
    engines = [engine for engine, _ in engines_of(pair[0]).idle._kept]
    assert len(set(map(id, engines))) == len(engines), "one of every set of sources"
    patch(pair[0])
    assert not kept(pair[0]), "a patch keeps its own"
    unpatch(pair[0])


DRAFTS = {
    "model": lambda target: {"assistant_model": noised(target)},
    "models": lambda target: {"assistant_model": [noised(target), noised(target, seed=2)]},
    "layer_skip": lambda target: {"assistant_model": LayerSkip(target, mlp=[1])},
    "heads": lambda target: {"draft_heads": DraftHeads.for_model(target, 2)},
    "eagle3": lambda target: {"drafter": random_eagle3(eagle3_config(target))},
    "dflash": lambda target: {"drafter": random_dflash(dflash_config(target))},
}


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("who", ["target", "draft"])
def test_no_model_is_kept_alive(cuda, name, who):
    target = tiny(num_hidden_layers=3)
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
