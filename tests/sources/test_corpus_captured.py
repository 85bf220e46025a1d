"""The corpus inside a captured step, as on a GPU: PyTorch's operators, nothing from the host, the same text."""

from __future__ import annotations

import fake_cuda
import pytest
import torch
from corpora import corpus_of
from engine.host_data import watch_steps
from models import prompts, tiny

from gsd_kernels import Corpus, GraphConfig, generate
from gsd_kernels.ops.table import OPS
from gsd_kernels_hf.engine.capture import WARM_STEPS

CONFIG = GraphConfig(depth=0, branch=2, max_rows=8, history_depth=3)
SAMPLED = {"do_sample": True, "temperature": 0.8, "seed": 3}


@pytest.fixture
def options(tmp_path, monkeypatch):
    """A target's text half in its corpus, with the look-up that a GPU has."""
    monkeypatch.setitem(OPS["corpus_recall"].implementations, "cpu", OPS["corpus_recall"].reference)
    target = tiny()
    own = target.generate(**prompts(2, 9), max_new_tokens=24, do_sample=False)
    corpus = Corpus(corpus_of(tmp_path / "index", own[0]))
    sources = {"draft_sources": ("history", corpus), "graph_config": CONFIG}
    return {"model": target, **prompts(2, 9), "max_new_tokens": 24, "pad_token_id": 0, **sources}


@pytest.mark.parametrize("sampling", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
def test_a_look_up_copies_nothing_from_the_host(options, sampling, monkeypatch):
    watched = watch_steps(monkeypatch)
    monkeypatch.setitem(OPS["dag_attention"].implementations, "cpu", OPS["dag_attention"].reference)
    generate(**options, **sampling)
    assert sum(watched) >= 3


@pytest.mark.parametrize("sampling", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
def test_replayed_steps_give_the_same_text(options, sampling, monkeypatch):
    expected = generate(**options, **sampling)
    cuda = fake_cuda.install(monkeypatch)
    assert torch.equal(generate(**options, **sampling), expected)
    assert cuda.counts["captures"] == 2
    assert cuda.counts["replays"] > WARM_STEPS
