"""The corpus as a draft source: the same text with any corpus, alone and mixed, and fewer steps with a good one."""

from __future__ import annotations

import copy
import pickle

import fake_cuda
import pytest
import torch
from corpora import corpus_of, random_text
from engine.host_data import watch_steps
from models import prompts, tiny

import gsd_kernels as gsd
from gsd_kernels import Corpus, GraphConfig
from gsd_kernels.ops.table import OPS
from gsd_kernels_hf.engine.capture import WARM_STEPS

CONFIG = GraphConfig(depth=2, width=3, branch=3, max_rows=24, merge_context=0, history_depth=4, history_width=3)
NEW = 32


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def corpora(target, tmp_path_factory):
    """Corpora that help, that mislead, and that say nothing, by name."""
    base = tmp_path_factory.mktemp("corpora")
    inputs = prompts(3, 14, seed=1)
    own = target.generate(**inputs, max_new_tokens=60, do_sample=False, eos_token_id=None)
    texts = {
        "own": list(own),
        "repeated": [[5] * 3000],
        "prompt": list(inputs["input_ids"]),
        "random": [random_text(4000)],
    }
    return {name: corpus_of(base / name, *parts) for name, parts in texts.items()}


@pytest.mark.parametrize("name", ["own", "repeated", "prompt", "random"])
def test_the_text_is_the_same_with_any_corpus(name, target, corpora):
    inputs = prompts(3, 14, seed=1)  # left-padded
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "seed": 4}):
        options = {"max_new_tokens": NEW, "eos_token_id": [2, 5], "pad_token_id": 0, **inputs, **sampling}
        sources = {"draft_sources": (Corpus(corpora[name]),), "graph_config": CONFIG}
        out = gsd.generate(target, **options, **sources, return_dict_in_generate=True)
        assert torch.equal(out.sequences, gsd.generate(target, **options, graph_config="plain"))
        assert name != "own" or sampling["do_sample"] or out.stats.tokens_per_step > 2.0


def test_it_serves_a_patched_model_with_one_mapping_for_all_sessions(target, corpora):
    corpus, copied = Corpus(corpora["own"]), []
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    inputs = [prompts(1, 14, seed=1), prompts(1, 9, seed=5)]
    plain = [target.generate(**each, **options) for each in inputs]
    with gsd.patch(target, draft_sources=("history", corpus), graph_config=CONFIG) as handle:
        for _ in range(2):
            for each, expected in zip(inputs, plain, strict=True):
                assert torch.equal(target.generate(**each, **options), expected)
        copied = [s for session in handle.engines.idle.sessions for s in session.mixer.sources if s.name == "corpus"]
        assert copied and all(s is not corpus and s.index is corpus.index for s in copied)
    assert not hasattr(corpus, "state"), "sessions work on copies"


def test_a_pickled_corpus_is_the_folder(corpora):
    corpus = Corpus(corpora["own"], name="mine")
    for other in (pickle.loads(pickle.dumps(corpus)), copy.deepcopy(corpus)):
        assert other.name == "mine" and other.header == corpus.header
    assert len(pickle.dumps(corpus)) < 1000


def test_two_corpora_need_two_names(target, corpora):
    options = {"max_new_tokens": 8, "do_sample": False, "graph_config": CONFIG}
    pair = Corpus(corpora["own"]), Corpus(corpora["random"])
    with pytest.raises(ValueError, match="corpus, corpus have a name twice"):
        gsd.generate(target, **prompts(1, 5), **options, draft_sources=pair)
    named = pair[0], Corpus(corpora["random"], name="other")
    out = gsd.generate(target, **prompts(1, 5), **options, draft_sources=named)
    assert torch.equal(out, target.generate(**prompts(1, 5), max_new_tokens=8, do_sample=False))


def test_a_corpus_of_tokens_that_the_target_lacks_is_refused(target, tmp_path):
    corpus = Corpus(corpus_of(tmp_path / "large", [1, 2, 200]))
    with pytest.raises(ValueError, match="made with a tokenizer of 201 tokens, the target has 97"):
        gsd.generate(target, **prompts(1, 5), draft_sources=(corpus,), max_new_tokens=4)


CAPTURED = GraphConfig(depth=0, branch=2, max_rows=8, history_depth=3)
SAMPLED = {"do_sample": True, "temperature": 0.8, "seed": 3}


@pytest.fixture
def captured(tmp_path, monkeypatch):
    """A target's text half in its corpus, with the look-up that a GPU has."""
    monkeypatch.setitem(OPS["corpus_recall"].implementations, "cpu", OPS["corpus_recall"].reference)
    target = tiny()
    own = target.generate(**prompts(2, 9), max_new_tokens=24, do_sample=False)
    corpus = Corpus(corpus_of(tmp_path / "index", own[0]))
    sources = {"draft_sources": ("history", corpus), "graph_config": CAPTURED}
    return {"model": target, **prompts(2, 9), "max_new_tokens": 24, "pad_token_id": 0, **sources}


@pytest.mark.parametrize("sampling", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
def test_a_look_up_copies_nothing_from_the_host(captured, sampling, monkeypatch):
    watched = watch_steps(monkeypatch)
    monkeypatch.setitem(OPS["dag_attention"].implementations, "cpu", OPS["dag_attention"].reference)
    gsd.generate(**captured, **sampling)
    assert sum(watched) >= 3


@pytest.mark.parametrize("sampling", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
def test_replayed_steps_give_the_same_text(captured, sampling, monkeypatch):
    expected = gsd.generate(**captured, **sampling)
    cuda = fake_cuda.install(monkeypatch)
    assert torch.equal(gsd.generate(**captured, **sampling), expected)
    assert cuda.counts["captures"] == 2
    assert cuda.counts["replays"] > WARM_STEPS
