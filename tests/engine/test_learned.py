"""What ``learn`` leaves of a model: found by itself, faster, never another text, and refused where it is damaged."""

from __future__ import annotations

import io
import logging
import sys

import pytest
import torch
from models import prompts, tiny, tokenizer
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import gsd_kernels as gsd
from gsd_kernels import GraphConfig
from gsd_kernels_hf import learning
from gsd_kernels_hf.engine.known import learned_file, learned_of
from gsd_kernels_hf.model.facts import Facts
from gsd_kernels_hf.sources.memory import prior, read_learned

SHAPE = GraphConfig(depth=0, branch=3, max_rows=16, history_depth=6, history_width=4)
GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.4, "seed": 3}
ASKED = [prompts(1, 9, seed=seed)["input_ids"][0] for seed in range(4)]


@pytest.fixture
def target(monkeypatch, tmp_path):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    return tiny()


@pytest.mark.parametrize(("batch", "decoding", "most"), [(1, GREEDY, 0.6), (3, GREEDY, 0.9), (3, SAMPLED, 1.1)])
def test_it_is_found_makes_texts_faster_and_changes_none(target, batch, decoding, most, caplog):
    """Its answers are greedy, and a batch takes as many steps as its slowest text."""
    call = {"input_ids": torch.stack(ASKED[:batch]), "attention_mask": torch.ones(batch, 9, dtype=torch.int64)}
    for number in range(batch):  # of a batch some are padded
        call["attention_mask"][number, :number] = 0
    call |= {**decoding, "draft_sources": ("history",), "graph_config": SHAPE, "return_dict_in_generate": True}
    before = gsd.generate(target, **call)
    plain = gsd.generate(target, **call | {"graph_config": "plain"}).sequences
    with caplog.at_level(logging.INFO, "gsd_kernels"):
        file = gsd.learn(target, prompts=ASKED, new_tokens=24, progress=False)
        after, again, without = (gsd.generate(target, **call, **more) for more in ({}, {}, {"learned": False}))
    assert file == learned_file(target) and file.is_file()
    assert sum("drafting with what was learned" in message for message in caplog.messages) == 1
    for out in (before, after, again, without):
        assert torch.equal(out.sequences, plain)
    assert after.stats.steps < most * before.stats.steps
    assert without.stats.steps == pytest.approx(before.stats.steps, abs=2)  # weights of sources are learned too


def test_prompts_are_texts_chats_and_ids_and_texts_are_read_beside(target, tmp_path):
    given = ["first words", [{"role": "user", "content": "second words"}], ASKED[0]]
    file = tmp_path / "own.safetensors"
    words = tokenizer(target.config.vocab_size)
    assert gsd.learn(target, words, prompts=given, new_tokens=6, file=file, progress=False) == file
    found = read_learned(file, fingerprint=learning.fingerprint(target), vocab_size=target.config.vocab_size)
    assert found.seen <= 18 and learned_of(Facts(target)) is None, "another file is not found by itself"
    two = torch.arange(20).reshape(1, 2, 10)  # two texts: nothing follows the end of the first
    gsd.learn(target, prompts=[], texts=[two], file=file, progress=False)
    read = read_learned(file, fingerprint=found.fingerprint, vocab_size=found.vocab_size)
    assert read.seen == 20 and read.table().keys.ne(0).sum() == len(read.keys) == 18
    assert sorted(read.tokens.tolist()) == [*range(1, 10), *range(11, 20)]


def test_weights_are_fitted_to_many_answers(target, monkeypatch, tmp_path):
    monkeypatch.setattr(learning, "FEWEST_NODES", 8)  # so that four short answers are many
    file = gsd.learn(target, prompts=ASKED, new_tokens=24, file=tmp_path / "fitted.safetensors")
    found = read_learned(file, fingerprint=learning.fingerprint(target), vocab_size=target.config.vocab_size)
    shipped = prior()
    assert found.weights.isfinite().all() and not torch.equal(found.weights, shipped.to(found.weights))
    call = {"input_ids": ASKED[0][None], **GREEDY, "draft_sources": ("history",), "return_dict_in_generate": True}
    plain, out = (gsd.generate(target, **call, graph_config=c, learned=file) for c in ("plain", SHAPE))
    assert torch.equal(out.sequences, plain.sequences) and out.stats.steps < plain.stats.steps


def test_interrupted_it_keeps_what_was_answered(target, monkeypatch, tmp_path, caplog):
    calls, file = iter(range(9)), tmp_path / "part.safetensors"

    def answer(*args, **kwargs):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return gsd.generate(*args, **kwargs)

    monkeypatch.setattr(learning, "generate", answer)
    gsd.learn(target, prompts=ASKED, new_tokens=8, file=file)
    assert "interrupted" in caplog.text
    assert read_learned(file, fingerprint=learning.fingerprint(target), vocab_size=97).seen == 16


def test_a_terminal_shows_how_far_it_is(target, monkeypatch, tmp_path):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    gsd.learn(target, prompts=ASKED[:2], new_tokens=6, file=tmp_path / "shown.safetensors")
    assert "2 of 2 prompts" in terminal.getvalue()


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"new_tokens": 0}, "new_tokens: expected an int of at least 1, got 0"),
        ({"prompts": ["words"]}, "tokenizer: prompts and texts that are no ids need the model's"),
        ({"prompts": []}, "prompts: expected at least one, or texts"),
        ({"texts": torch.arange(5)}, "texts: expected several, got one Tensor; put it into a list"),
        ({"texts": [torch.arange(5), torch.arange(95, 98)]}, "texts: number 2: expected ids from 0 to 96"),
        ({"prompts": [torch.rand(3)]}, "prompts: number 1: expected ids"),
        ({"file": "."}, "file: expected the name of a file to write, got the folder"),
        ({"file": f"{__file__}/learned"}, f"file: {__file__} cannot be written to"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_before_anything_is_answered(target, wrong, match):
    with pytest.raises((ValueError, TypeError, OSError), match=match):
        gsd.learn(target, **{"prompts": ASKED, "progress": False} | wrong)
    assert not learned_file(target).exists()


OTHER = {  # a line of its metadata, and what its reader says
    "another model": ({}, "is of another model"),
    "a newer version": ({"version": "99"}, "newer than"),
    "another format": ({"format": "else"}, "was not written by gsd-kernels learn"),
    "NaN weights": ({}, "damaged"),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_cannot_be_used_is_ignored_with_one_line(target, name, caplog):
    place, (changes, said) = learned_file(target), OTHER[name]
    learnt = tiny(seed=1) if name == "another model" else target
    gsd.learn(learnt, prompts=ASKED[:1], new_tokens=8, file=place, progress=False)
    if learnt is target:
        with safe_open(place, framework="pt") as opened:
            about, tensors = opened.metadata() | changes, load_file(place)
        save_file(tensors | {"weights": tensors["weights"] * torch.nan}, place, metadata=about)
    with pytest.raises(ValueError, match=said):
        read_learned(place, fingerprint=learning.fingerprint(target), vocab_size=97)
    plain = gsd.generate(target, ASKED[0][None], **GREEDY, graph_config="plain")
    with caplog.at_level(logging.INFO, "gsd_kernels"):
        for _ in range(2):
            assert torch.equal(gsd.generate(target, ASKED[0][None], **GREEDY, draft_sources=("history",)), plain)
    assert sum("which cannot be used" in message for message in caplog.messages) == 1
    assert not any("drafting with" in message for message in caplog.messages)
