"""Storage grows with a text, between steps and without a trace in it; lengths beyond the model's positions."""

from __future__ import annotations

import copy
import functools
import logging

import fake_cuda
import pytest
import torch
from models import endless, noised, prompts

import gsd_kernels as gsd
from gsd_kernels_hf.engine import room
from gsd_kernels_hf.engine.session import Session

VOCAB = 41
SHAPE = gsd.GraphConfig(depth=3, width=2, branch=2, max_rows=10, history_depth=2, history_width=2)
LENGTH, NEW = 9, 60
SAMPLED = {"do_sample": True, "temperature": 0.8, "seed": 3}


@functools.cache
def pair():
    target = endless(vocab_size=VOCAB, num_hidden_layers=3)
    return target, noised(target, 0.03)


def call(**more):
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
def expected(sampled: bool, penalty: float) -> torch.Tensor:
    target = pair()[0]
    if sampled:
        return gsd.generate(target, **call(repetition_penalty=penalty) | SAMPLED)
    return target.generate(**call(repetition_penalty=penalty))


def test_growth_of_captured_steps(small, monkeypatch):
    target, draft = pair()
    heads, drafts = gsd.DraftHeads.for_model(target, 2), [draft, noised(target, 0.06, seed=2)]
    options = {"assistant_model": drafts, "draft_heads": heads, "graph_config": SHAPE}
    wanted = gsd.generate(target, **call(**options))
    small.clear()
    cuda = fake_cuda.install(monkeypatch)
    assert torch.equal(gsd.generate(target, **call(**options)), wanted)
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
    wanted = target.generate(**call())
    assert wanted.shape[1] == LENGTH + NEW > 40
    with caplog.at_level(logging.WARNING, logger="gsd_kernels"):
        assert torch.equal(gsd.generate(target, **call(**options)), wanted)
    assert warnings_of(caplog) == [
        "the text goes on beyond the 40 positions that the model was made for (max_position_embeddings)"
    ]


@functools.cache
def short_draft(positions: int = 30):
    """A draft with fewer positions than the target of :func:`pair`."""
    _, draft = pair()
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
    [
        (name, ({}, SAMPLED, {"repetition_penalty": 1.1})[(i + j) % 3])
        for i, name in enumerate(OUTGROWN)
        for j in (0, 1)
    ],
    ids=str,
)
def test_a_draft_is_left_out_where_its_positions_end(name, more):
    target, _ = pair()
    options = call(**OUTGROWN[name], assistant_model=short_draft(), return_dict_in_generate=True) | more
    seen = []
    out = gsd.generate(target, **options, observer=lambda v: seen.append(int(v.rows.depths.max())))
    assert torch.equal(out.sequences, expected("do_sample" in more, more.get("repetition_penalty", 1.0)))
    assert out.stats.left_out == ["model"] and (name.startswith("auto") or out.stats.tokens_per_step > 1)
    if name == "chain":
        assert max(seen) == 5 and seen[-1] == 0, "plain behind"
        assert sum(depth == 0 for depth in seen) > 8
