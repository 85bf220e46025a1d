"""``gsd-kernels export``: what goes into the folder, and what is refused."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from checkpoints import save_pair
from exported.loading import CALL, loaded
from huggingface_hub import ModelCard
from models import noised, prompts
from sources.drafters import eagle3_config, fit_eagle3, random_eagle3, safeailab, save
from sources.mtp_checkpoints import saved
from two_tokenizers import byte_level
from typer.testing import CliRunner

from gsd_kernels_cli import model_folder
from gsd_kernels_cli.app import app
from gsd_kernels_cli.card import card_of
from gsd_kernels_hf import progress
from gsd_kernels_hf.api import handle_of


def run(*arguments):
    return CliRunner().invoke(app, ["export", *(str(a) for a in arguments)])


def exported(folder, *arguments) -> dict:
    done = run(folder, *arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return {**json.loads(done.stdout), **json.loads((folder / "gsd_kernels.json").read_text())}


def check(folder, target, *sources) -> None:
    """The folder's model writes what the checkpoint's does, and these sources drafted."""
    inputs = prompts(1, 12, vocab=200)
    plain = loaded(target, None, torch.float64).generate(**inputs, **CALL)
    model = loaded(folder, True, torch.float64)
    assert torch.equal(model.generate(**inputs, **CALL), plain)
    assert set(handle_of(model).stats.sources) == set(sources)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A pair, heads of EAGLE-3, and an index, all of one byte tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    target, _ = save_pair(folder)
    model = loaded(target, None)
    config = eagle3_config(model)
    save(folder / "eagle3", config, safeailab(fit_eagle3(random_eagle3(config), model)))
    (folder / "a.py").write_text("def f(x):\n    return x\n" * 20)
    done = CliRunner().invoke(app, ["index", str(folder / "a.py"), "-o", str(folder / "index"), "--tokenizer", target])
    assert done.exit_code == 0, done.stderr
    return folder


def test_a_drafter_a_draft_and_a_corpus(models, tmp_path):
    parts = ("--draft", models / "draft", "--drafter", models / "eagle3", "--corpus", models / "index")
    folder = tmp_path / "all"
    found = exported(folder, "--model", models / "target", *parts, "--graph-config", "graph,depth=3,history_depth=2")
    assert found["drafts"] == ["draft", "drafter", "corpus"] and found["graph_config"]["depth"] == 3
    check(folder, models / "target", "model", "eagle3", "corpus", "history")
    assert not list(tmp_path.glob(".partial*"))


@pytest.mark.parametrize("link", [False, True])
def test_it_says_how_much_is_written(models, tmp_path, monkeypatch, link):
    """Where stderr is no terminal, a line now and then; here of every piece."""
    monkeypatch.setattr(progress, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(model_folder, "MB", 1.0)
    monkeypatch.setattr(model_folder, "PIECE_BYTES", 1 << 16)
    parts = ("--model", models / "target", "--draft", models / "draft", *["--link"] * link)
    done = run(tmp_path / "out", *parts)
    counts = re.findall(r"writing .*/out: ([\d,]+) of ([\d,]+) MB", done.stderr)
    said = [int(count.replace(",", "")) for count, _ in counts]
    total = int(counts[0][1].replace(",", ""))
    taken = [
        tmp_path / "out" / place / name for place in ("", "draft") for name in ("model.safetensors", "config.json")
    ]
    assert said == sorted(said) and len(set(said)) > 4 and said[-1] == total
    assert total >= sum(file.stat().st_size for file in taken)


def test_commands_draft_with_what_the_folder_names(models, tmp_path):
    """Unless they are told of drafts."""
    parts = ("--draft", models / "draft", "--drafter", models / "eagle3", "--corpus", models / "index")
    exported(tmp_path / "all", "--model", models / "target", *parts, "--graph-config", "graph,depth=3,history_depth=2")

    def stats(*more):
        said = [*("--model", tmp_path / "all"), *more, "--max-new-tokens", 12, "--stats", "json", "def f"]
        done = CliRunner().invoke(app, ["generate", *(str(word) for word in said)])
        assert done.exit_code == 0, done.stderr
        return json.loads(done.stderr.splitlines()[-1])

    assert stats()["sources"].keys() == {"model", "eagle3", "corpus", "history"}
    assert stats("--draft", "history")["sources"].keys() == {"history"}


def test_a_model_alone_drafts_from_the_text(models, tmp_path):
    found = exported(tmp_path / "alone", "--model", models / "target")
    assert found["drafts"] == [] and not (tmp_path / "alone" / "draft").exists()
    check(tmp_path / "alone", models / "target", "history")
    exported(tmp_path / "linked", "--model", models / "target", "--link")
    places = [where / "model.safetensors" for where in (models / "target", tmp_path / "alone", tmp_path / "linked")]
    assert not places[0].samefile(places[1]) and places[0].read_bytes() == places[1].read_bytes()
    assert places[0].samefile(places[2])


def test_heads_in_the_models_own_checkpoint(tmp_path):
    saved("mimo", tmp_path / "own")
    found = exported(tmp_path / "out", "--model", tmp_path / "own", "--drafter", "mtp")
    assert found["drafter"] == "mtp" and not (tmp_path / "out" / "drafter").exists()


def test_a_draft_of_another_tokenizer(models, tmp_path):
    draft = tmp_path / "other"
    small = noised(loaded(models / "target", None))
    tokenizer = byte_level()
    small.resize_token_embeddings(len(tokenizer))
    small.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    found = exported(tmp_path / "out", "--model", models / "target", "--draft", draft)
    assert found["assistant_tokenizer"] == "draft"
    check(tmp_path / "out", models / "target", "model", "history")


def test_an_exported_folder_is_exported_anew(models, tmp_path):
    exported(tmp_path / "one", "--model", models / "target", "--draft", models / "draft")
    found = exported(tmp_path / "two", "--model", tmp_path / "one")
    assert found["drafts"] == [] and not (tmp_path / "two" / "draft").exists()
    assert (tmp_path / "two" / "README.md").read_text().count("## Description") == 1


def test_what_it_prints_is_how_it_is_used(models, tmp_path):
    done = run(tmp_path / "out", "--model", models / "target")
    assert done.exit_code == 0
    assert f'from_pretrained("{tmp_path}/out", trust_remote_code=True).generate' in done.stdout
    assert f"transformers serve {tmp_path}/out --trust-remote-code\ngsd-kernels serve {tmp_path}/out\n" in done.stdout
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.count("# target\n") == 1 and str(tmp_path) not in card, "a card may be published"


def test_the_card_of_a_model_of_the_hub_names_it(tmp_path):
    card = ModelCard(card_of(tmp_path, "someone/model", ["drafter"]))
    assert card.data.base_model == "someone/model" and "`drafter/`" in card.text


def adapter(folder):
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")


def pickled(folder):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"")


REFUSED = {
    "exists": (lambda folder: (folder.parent / "out").mkdir(), "DIR: .*/out exists; name a new folder"),
    "adapter": (adapter, "--model: .* is an adapter.*merge_and_unload"),
    "pickles": (pickled, "--model: no model.safetensors .*save_pretrained"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_taken_along_is_refused(make, message, models, tmp_path):
    make(tmp_path / "bad")
    where = tmp_path / "bad" if (tmp_path / "bad").exists() else models / "target"
    done = run(tmp_path / "out", "--model", where)
    assert done.exit_code == 2 and re.search(message, done.stderr), done.stderr


def test_a_pair_that_does_not_fit_is_refused_and_nothing_is_written(models, tmp_path):
    shutil.copytree(models / "eagle3", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "hidden_size": 48}))
    for options, message in {
        ("--drafter", tmp_path / "other"): "--drafter: ",
        ("--draft", "none"): "--draft: none drafts nothing",
        ("--corpus", tmp_path / "other"): "--corpus: ",
    }.items():
        done = run(tmp_path / "out", "--model", models / "target", *options)
        assert done.exit_code == 2 and message in done.stderr, done.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other"]
