"""Model folders: `gsd-kernels export` writes them, who loads them need not name us; and `custom_generate=FOLDER`."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import save_pair
from kept import keep_modules
from models import noised, prompts, tiny
from sources.drafters import eagle3_config, fit_eagle3, random_eagle3, safeailab, save
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList
from transformers.generation import RepetitionPenaltyLogitsProcessor
from typer.testing import CliRunner

import gsd_kernels as gsd
from gsd_kernels_cli import demo
from gsd_kernels_cli.app import app
from gsd_kernels_hf.api import handle_of
from gsd_kernels_hf.exported.folder import CALLS, FILE, custom_generate

CALL = {"max_new_tokens": 40, "do_sample": False}


@pytest.fixture(autouse=True)
def own_modules(tmp_path_factory, monkeypatch):
    keep_modules(monkeypatch, tmp_path_factory.mktemp("modules"))


def loaded(folder: Path | str, trust: bool | None = True, dtype: torch.dtype = torch.float32):
    """A folder's model, as anybody loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust, dtype=dtype)


def export(folder: Path, *arguments) -> str:
    """What ``gsd-kernels export`` says."""
    done = CliRunner().invoke(app, ["export", *map(str, (folder, *arguments))])
    assert done.exit_code in (0, 2), done.output
    return done.stdout if done.exit_code == 0 else done.stderr


@pytest.fixture(scope="session")
def exported(tmp_path_factory) -> Path:
    """The embedded pair's folder."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    export(folder, "--model", demo.path() / "target", "--draft", demo.path() / "draft")
    return folder


@pytest.fixture(scope="session")
def prompt():
    tokenizer = AutoTokenizer.from_pretrained(demo.path() / "target")
    return dict(tokenizer("import os\nimport sys\nimport", return_tensors="pt"))


@pytest.fixture(scope="session")
def plain(prompt):
    """What transformers' own generate writes."""
    return loaded(demo.path() / "target", None).generate(**prompt, **CALL)


def copied(exported: Path, folder: Path) -> Path:
    return Path(shutil.copytree(exported, folder, copy_function=lambda here, there: Path(there).hardlink_to(here)))


def test_its_generate_is_ours_and_the_text_is_the_models_own(exported, prompt, plain, caplog):
    model = loaded(exported)
    with caplog.at_level(logging.INFO, CALLS):
        for given in ((prompt["input_ids"],), ()):
            assert torch.equal(model.generate(*given, **CALL, **({} if given else prompt)), plain)
            assert {"model", "history"} <= set(handle_of(model).stats.sources)
    assert sum("40 tokens in" in line for line in caplog.messages) == 2
    model.generate(**prompt, **CALL, graph_config="graph")  # auto goes by the clock
    assert handle_of(model).stats.tokens_per_step > 1.5
    out = model.generate(**prompt, **CALL, assistant_model=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain) and set(out.stats.sources) == {"history"}


def test_without_trust_it_is_transformers_own(exported, prompt, plain):
    plainly = loaded(exported, None)
    assert "generate" not in vars(plainly) and torch.equal(plainly.generate(**prompt, **CALL), plain)
    door = {"custom_generate": str(exported), "trust_remote_code": True}
    out = plainly.generate(**prompt, **CALL, **door, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain) and "model" in out.stats.sources, "its folder's draft, by the other door"


def test_a_model_that_is_not_served_as_it_was_loaded_goes_there(exported, prompt, caplog):
    model = loaded(exported)
    model.config.sliding_window = 5  # of the cache alone
    expected = type(model).generate(model, **prompt, **CALL)
    assert torch.equal(model.generate(**prompt, **CALL), expected)
    assert "transformers' own generate serves this model: model: " in caplog.text
    with pytest.raises(ValueError, match="graph_config: this call goes to transformers"):
        model.generate(**prompt, **CALL, graph_config="tree")


def replaced(file: Path, text: str) -> None:
    file.unlink()  # the others' is the same
    file.write_text(text, encoding="utf-8")


HEAD = '{"format": "gsd_kernels model folder", "version": '
LOST = {
    "moved": (lambda here: here.rename(here.parent / "there"), "no such folder: ./here"),
    "no draft": (lambda here: shutil.rmtree(here / "draft"), "expected 'draft', a folder in"),
    **{
        text: (lambda here, text=text: replaced(here / FILE, text), message)
        for text, message in (
            ("{", "is damaged"),
            ('{"format": "", "version": 1}', "is none of gsd_kernels"),
            (HEAD + "2}", "has version 2, unknown.*update the package"),
            (HEAD + '1, "graph_config": {"depth": -1}}', "gsd_kernels.json is damaged .depth"),
            (HEAD + '1, "drafter": "../x"}', "expected 'drafter', a folder"),
        )
    },
}


@pytest.mark.parametrize("name", LOST)
def test_what_a_folder_has_no_more_is_named_and_transformers_serves(name, exported, tmp_path, prompt, plain, caplog):
    here = copied(exported, tmp_path / "here")
    with contextlib.chdir(tmp_path):
        model = loaded("./here")
        lose, message = LOST[name]
        lose(here)
        assert all(torch.equal(model.generate(**prompt, **CALL), plain) for _ in range(2))
    lines = [line for line in caplog.messages if "transformers' own generate serves this model" in line]
    assert len(lines) == 2 and re.search(message, lines[1]), lines


def test_a_folder_without_options_drafts_from_the_text(exported, tmp_path, prompt, plain):
    """Somebody put ``custom_generate/`` into a model's repository."""
    folder = copied(exported, tmp_path / "bare")
    (folder / FILE).unlink()
    model = loaded(folder)
    assert torch.equal(model.generate(**prompt, **CALL), plain)
    assert set(handle_of(model).stats.sources) == {"history"}


# ``model.generate(…, custom_generate=FOLDER, trust_remote_code=True)``, by transformers itself.


FOLDER = gsd.custom_generate_folder()
SHORT = {**prompts(2, 9), "max_new_tokens": 24, "do_sample": False, "eos_token_id": None}


def test_the_packages_own_folder_writes_the_models_own_text():
    """Of a patched model too."""
    target, door = tiny(), {"custom_generate": FOLDER, "trust_remote_code": True}
    variables, draft = set(vars(target)), noised(target)
    penalty = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])
    for theirs in ({}, {"bad_words_ids": [[5], [7, 9]], "logits_processor": penalty}):
        expected = target.generate(**SHORT, **theirs)
        out = target.generate(**SHORT, **theirs, **door, assistant_model=draft, return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected)
        assert out.stats.steps > 0 and set(vars(target)) == variables
    with gsd.patch(target, assistant_model=draft):
        assert torch.equal(target.generate(**SHORT, **theirs, **door), expected)
    with pytest.raises(ValueError, match="num_beams"):
        target.generate(**SHORT, **door, num_beams=2)
    with pytest.raises(TypeError, match=r"multiple values|too many"):
        custom_generate(SHORT["input_ids"], None, model=target, generation_config=None)
    listed = re.findall(r"^- `(\w+)`", Path(FOLDER, "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) >= 6 and set(listed) <= set(gsd.GraphDecoder.__dataclass_fields__)


def test_without_the_package_the_error_names_the_cure(tmp_path, monkeypatch):
    """From a copy, of which transformers has no module yet."""
    shutil.copytree(Path(FOLDER, "custom_generate"), tmp_path / "custom_generate")
    target, call = tiny(), SHORT | {"custom_generate": str(tmp_path), "trust_remote_code": True}
    for found in (None, type(sys)("gsd_kernels")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "gsd_kernels", found)
            with pytest.raises(ImportError, match=r"not installed here, or too old.*pip install"):
                target.generate(**call)
    assert torch.equal(target.generate(**call), target.generate(**SHORT))


# ``gsd-kernels export``: what goes into the folder, and what is refused.


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
    shape = ("--graph-config", "graph,depth=3,history_depth=2")
    found = json.loads(export(tmp_path / "all", "--model", models / "target", *parts, *shape, "--json"))
    assert found["drafts"] == ["draft", "drafter", "corpus"]
    assert json.loads((tmp_path / "all" / FILE).read_text())["graph_config"]["depth"] == 3
    inputs, sources = prompts(1, 12, vocab=200), {"model", "eagle3", "corpus", "history"}
    expected = loaded(models / "target", None, torch.float64).generate(**inputs, **CALL)
    model = loaded(tmp_path / "all", True, torch.float64)
    assert torch.equal(model.generate(**inputs, **CALL), expected)
    assert set(handle_of(model).stats.sources) == sources and not list(tmp_path.glob(".partial*"))
    for more, drafted in ((), sources), (("--draft", "history"), {"history"}):
        said = [*("--model", str(tmp_path / "all")), *more, "--max-new-tokens", "12", "--stats", "json", "def f"]
        done = CliRunner().invoke(app, ["generate", *said])
        assert json.loads(done.stderr.splitlines()[-1])["sources"].keys() == drafted


def test_what_cannot_be_taken_along_is_refused_and_nothing_is_written(models, tmp_path):
    shutil.copytree(models / "eagle3", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "hidden_size": 48}))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    target = ("--model", models / "target")
    for folder, options, message in (
        ("other", target, "DIR: .*/other exists; name a new folder"),
        ("out", ("--model", tmp_path / "adapter"), "--model: .* is an adapter.*merge_and_unload"),
        ("out", (*target, "--drafter", tmp_path / "other"), "--drafter: "),
        ("out", (*target, "--draft", "none"), "--draft: none drafts nothing"),
        ("out", (*target, "--corpus", tmp_path / "other"), "--corpus: "),
    ):
        assert re.search(message, export(tmp_path / folder, *options)), message
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter", "other"]
