"""The corpus as a draft source: the same text with any corpus, alone and mixed, and fewer steps with a good one."""

from __future__ import annotations

import pytest
import torch
from corpora import corpus_of, random_text
from models import prompts, tiny

import gsd_kernels as gsd
from gsd_kernels import Corpus, GraphConfig

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
