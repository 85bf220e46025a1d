"""``gsd-kernels export``: what goes into the folder, and what is refused."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from checkpoints import save_pair
from exported.loading import CALL, loaded
from models import prompts
from sources.drafters import eagle3_config, fit_eagle3, random_eagle3, safeailab, save
from sources.mtp_checkpoints import saved
from typer.testing import CliRunner

from gsd_kernels_cli.app import app
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
    """Commands draft with what the folder names, unless they are told of drafts."""
    parts = ("--draft", models / "draft", "--drafter", models / "eagle3", "--corpus", models / "index")
    folder = tmp_path / "all"
    found = exported(folder, "--model", models / "target", *parts, "--graph-config", "graph,depth=3,history_depth=2")
    assert found["drafts"] == ["draft", "drafter", "corpus"] and found["graph_config"]["depth"] == 3
    check(folder, models / "target", "model", "eagle3", "corpus", "history")
    assert not list(tmp_path.glob(".partial*"))

    def stats(*more):
        said = [*("--model", folder), *more, "--max-new-tokens", 12, "--stats", "json", "def f"]
        done = CliRunner().invoke(app, ["generate", *(str(word) for word in said)])
        assert done.exit_code == 0, done.stderr
        return json.loads(done.stderr.splitlines()[-1])

    assert stats()["sources"].keys() == {"model", "eagle3", "corpus", "history"}
    assert stats("--draft", "history")["sources"].keys() == {"history"}


def test_heads_in_the_models_own_checkpoint(tmp_path):
    saved("mimo", tmp_path / "own")
    found = exported(tmp_path / "out", "--model", tmp_path / "own", "--drafter", "mtp")
    assert found["drafter"] == "mtp" and not (tmp_path / "out" / "drafter").exists()


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
