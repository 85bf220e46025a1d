"""What ``learn`` leaves of a model: found by itself, faster, never another text, and refused where it is damaged."""

from __future__ import annotations

import logging

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
from gsd_kernels_hf.sources.learned import FORMAT, read_learned
from gsd_kernels_hf.sources.saved import write_saved

SHAPE = GraphConfig(depth=0, branch=3, max_rows=16, history_depth=6, history_width=4)
GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.4, "seed": 3}
ASKED = [prompts(1, 9, seed=seed)["input_ids"][0] for seed in range(4)]


@pytest.fixture
def target(monkeypatch, tmp_path):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    return tiny()


def learned(model, **options):
    return gsd.learn(model, prompts=ASKED, new_tokens=24, progress=False, **options)


def run(model, inputs, decoding, **options):
    options = {"draft_sources": ("history",), "graph_config": SHAPE, "return_dict_in_generate": True} | options
    return gsd.generate(model, **inputs, **decoding, **options)


@pytest.mark.parametrize("decoding", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
def test_it_is_found_makes_texts_faster_and_changes_none(target, decoding, batch, caplog):
    inputs = {"input_ids": torch.stack(ASKED[:batch]), "attention_mask": torch.ones(batch, 9, dtype=torch.int64)}
    for number in range(batch):  # of a batch some are padded
        inputs["attention_mask"][number, :number] = 0
    before = run(target, inputs, decoding)
    plain = gsd.generate(target, **inputs, **decoding, graph_config="plain")
    with caplog.at_level(logging.INFO, "gsd_kernels"):
        file = learned(target)
        after = run(target, inputs, decoding)
        again = run(target, inputs, decoding)
        without = run(target, inputs, decoding, learned=False)
    assert file == learned_file(target) and file.is_file()
    assert sum("drafting with what was learned" in message for message in caplog.messages) == 1
    for out in (before, after, again, without):
        assert torch.equal(out.sequences, plain)
    # Its answers were greedy, and a batch takes as many steps as its slowest text. The ledger has no part in this: it
    # weighs a source beside others, and here the history is alone, whose chances begin with the weights of the file.
    most = 1.1 if decoding is SAMPLED else 0.6 if batch == 1 else 0.9
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


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"new_tokens": 0}, "new_tokens: expected an int of at least 1, got 0"),
        ({"prompts": ["words"]}, "tokenizer: prompts and texts that are no ids need the model's"),
        ({"prompts": []}, "prompts: expected at least one, or texts"),
        ({"prompts": "words"}, "prompts: expected several, got one str; put it into a list"),
        ({"texts": torch.arange(5)}, "texts: expected several, got one Tensor; put it into a list"),
        (
            {"texts": [torch.arange(5), torch.arange(95, 98)]},
            "texts: number 2: expected ids from 0 to 96, at least one",
        ),
        ({"prompts": [torch.tensor([-1, 4])]}, "prompts: number 1: expected ids from 0 to 96"),
        (
            {"prompts": [torch.empty(0, dtype=torch.int64)]},
            "prompts: number 1: expected ids from 0 to 96, at least one",
        ),
        ({"prompts": [torch.rand(3)]}, "prompts: number 1: expected ids"),
        ({"file": "."}, "file: expected the name of a file to write, got the folder"),
        ({"file": f"{__file__}/learned"}, f"file: {__file__} cannot be written to"),
        ({"file": "/proc/learned"}, "file: /proc cannot be written to"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_before_anything_is_answered(target, wrong, match):
    with pytest.raises((ValueError, TypeError, OSError), match=match):
        gsd.learn(target, **{"prompts": ASKED, "progress": False} | wrong)
    assert not learned_file(target).exists()


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """A model's file, and the model's fingerprint, by which it is read."""
    file, model = tmp_path_factory.mktemp("once") / "learned.safetensors", tiny()
    gsd.learn(model, prompts=ASKED[:2], new_tokens=12, progress=False, file=file)
    return file, learning.fingerprint(model)


ELSEWHERE = {
    "another model": ({"fingerprint": "0" * 16}, "is of another model"),
    "another vocabulary": ({"vocab_size": "31"}, "a vocabulary of 31 tokens, not 97"),
    "a newer version": ({"version": 99}, "newer than"),
    "another format": ({"form": "else"}, "was not written by gsd-kernels learn"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_file_of_something_else_is_refused(once, tmp_path, name):
    (file, print_), place, (changes, match) = once, tmp_path / "else.safetensors", ELSEWHERE[name]
    about = metadata(file)
    given = {"form": about.pop("format"), "version": about.pop("version")} | about | changes
    write_saved(place, tensors=load_file(file), **{name: given[name] for name in given if name != "sum"})
    with pytest.raises(ValueError, match=match):
        read_learned(place, fingerprint=print_, vocab_size=97)


@pytest.mark.parametrize("name", ["NaN weights", "noise", "another model"])
def test_what_cannot_be_used_is_ignored_with_one_line(once, target, name, caplog):
    place, tensors, about = learned_file(target), load_file(once[0]), metadata(once[0])
    if name == "noise":
        place.write_bytes(b"\xff" * 300)
    else:
        tensors["weights"] = tensors["weights"] * torch.nan
        save_file(tensors, place, metadata=about | ({} if name == "NaN weights" else {"fingerprint": "0" * 16}))
    plain = gsd.generate(target, ASKED[0][None], **GREEDY, graph_config="plain")
    with caplog.at_level(logging.INFO, "gsd_kernels"):
        for _ in range(2):
            assert torch.equal(gsd.generate(target, ASKED[0][None], **GREEDY, draft_sources=("history",)), plain)
    assert sum("which cannot be used" in message for message in caplog.messages) == 1
    assert not any("drafting with" in message for message in caplog.messages)


def metadata(file):
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata()["format"] == FORMAT
        return opened.metadata()
