"""Where an object is loaded from a folder or file, the place may be given: a string, a path, with ``~``."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch

import gsd_kernels as gsd
from gsd_kernels_cli.corpus import build_corpus
from gsd_kernels_hf.sources import load

TOKENS = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture
def target():
    return models.tiny()


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("kind", [str, Path], ids=["str", "Path"])
def test_heads_by_their_folder(target, home, kind):
    gsd.DraftHeads.for_model(target, 2).save_pretrained(kind("~/heads"))
    assert (home / "heads").is_dir()
    prompt = models.prompts(1, 9)
    expected = target.generate(**prompt, **TOKENS)
    assert torch.equal(gsd.generate(target, **prompt, draft_heads=kind("~/heads"), **TOKENS), expected)
    with gsd.patch(target, draft_heads=kind(str(home / "heads"))) as handle:
        for _ in range(2):
            assert torch.equal(target.generate(**prompt, **TOKENS), expected)
        assert "heads" in handle.stats.sources and len(list(handle.engines)) == 1, "the same object in every call"
        target.generate(**prompt, draft_heads=False, **TOKENS)
        assert "heads" not in handle.stats.sources


def test_heads_are_loaded_once_beside_a_drafter(target, tmp_path, monkeypatch):
    gsd.DraftHeads.for_model(target, 2).save_pretrained(tmp_path / "heads")
    first = load.loaded_heads(tmp_path / "heads", target)
    assert load.loaded_heads(str(tmp_path / "heads"), target) is first
    other = load.loaded_drafter(tmp_path / "heads", target)
    assert other is not first and load.loaded_heads(tmp_path / "heads", target) is first, "each option its own"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("draft_heads", "./no-such", "draft_heads: no such folder"),
        ("draft_heads", 3, "draft_heads: expected DraftHeads, their folder or hub id, got int"),
        ("assistant_model", "folder", "assistant_model: expected a model, got the path 'folder'; load it"),
        ("assistant_model", Path("folder"), "assistant_model: expected a model, got the path 'folder'; load it"),
    ],
)
def test_a_place_that_is_none_is_refused_by_name(target, option, value, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        gsd.patch(target, **{option: value})
    assert "generate" not in vars(target)


def test_a_folder_without_heads_names_what_it_lacks(target, tmp_path):
    with pytest.raises(ValueError, match=r"^draft_heads: no draft_heads\.json in"):
        gsd.patch(target, draft_heads=tmp_path)


def test_the_history_and_a_corpus_by_their_place(target, home):
    build_corpus("~/corpus", [[3, 4, 5, 6, 7] * 4])
    for place in ("~/corpus", Path("~/corpus"), home / "corpus"):
        assert gsd.Corpus(place).folder == home / "corpus"
    with gsd.patch(target) as handle:
        target.generate(**models.prompts(1, 9), **TOKENS)
        handle.history.save("~/history.safetensors")
        kept = len(handle.history)
        handle.history.clear()
        handle.history.load(Path("~/history.safetensors"))
        assert len(handle.history) == kept > 0
