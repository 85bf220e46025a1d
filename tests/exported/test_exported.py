"""Model folders: `gsd-kernels export` writes them, who loads them need not name us; and `custom_generate=FOLDER`."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import save_pair
from exported.loading import CALL, TEXT, keep_modules, loaded
from models import noised, prompts, tiny
from shared import once
from sources.drafters import eagle3_config, fit_eagle3, random_eagle3, safeailab, save, saved
from transformers import AutoTokenizer, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import MaxLengthCriteria, RepetitionPenaltyLogitsProcessor
from typer.testing import CliRunner

import gsd_kernels as gsd
from gsd_kernels_cli import demo
from gsd_kernels_cli.app import app
from gsd_kernels_hf.api import handle_of
from gsd_kernels_hf.exported.call import CALLS, custom_generate
from gsd_kernels_hf.exported.options import FILE

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


@pytest.fixture(autouse=True)
def own_modules(tmp_path_factory, monkeypatch):
    keep_modules(monkeypatch, tmp_path_factory.mktemp("modules"))


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> Path:
    """Checkpoints of the embedded pair, ``target`` with a chat template and a card of its own, ``draft``."""

    def make(folder: Path) -> None:
        for name in ("target", "draft"):
            shutil.copytree(demo.path() / name, folder / name)
        tokenizer = AutoTokenizer.from_pretrained(folder / "target")
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder / "target")
        card = "---\nlicense: psf-2.0\ntags:\n- code\n---\n\n# A small model\n\nOf Python.\n"
        (folder / "target" / "README.md").write_text(card, encoding="utf-8")

    return once(tmp_path_factory, "pair", make)


@pytest.fixture(scope="session")
def exported(tmp_path_factory, pair) -> Path:
    """It, as ``gsd-kernels export`` writes it."""

    def make(folder: Path) -> None:
        options = ["--model", str(pair / "target"), "--draft", str(pair / "draft")]
        done = CliRunner().invoke(app, ["export", str(folder / "model"), *options])
        assert done.exit_code == 0, done.output

    return once(tmp_path_factory, "exported", make) / "model"


@pytest.fixture(scope="session")
def prompt(pair):
    return dict(AutoTokenizer.from_pretrained(pair / "target")(TEXT, return_tensors="pt"))


@pytest.fixture(scope="session")
def plain(pair, prompt):
    """What transformers' own generate writes."""
    return loaded(pair / "target", None).generate(**prompt, **CALL)


# A folder that ``gsd-kernels export`` wrote, in the hands of those who load model folders: nobody names us.


@pytest.fixture
def model(exported):
    return loaded(exported)


class Lines(logging.Handler):
    """Keeps what a logger says, whoever else it tells."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def told():
    """Lines of the log of calls."""
    logger, handler = logging.getLogger(CALLS), Lines()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def copied(exported: Path, folder: Path) -> Path:
    return Path(shutil.copytree(exported, folder, copy_function=lambda here, there: Path(there).hardlink_to(here)))


@pytest.mark.parametrize("positional", [False, True])
def test_its_generate_is_ours_and_the_text_is_the_models_own(positional, model, prompt, plain, told):
    ids = prompt["input_ids"]
    for _ in range(2):
        out = model.generate(ids, **CALL) if positional else model.generate(**prompt, **CALL)
        assert torch.equal(out, plain)
        stats = handle_of(model).stats
        assert {"model", "history"} <= set(stats.sources)
    assert len(told) == 2 and all("40 tokens in" in line for line in told)
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


def test_a_model_that_is_not_served_as_it_was_loaded_goes_there(model, prompt, plain, monkeypatch, caplog):
    def refuse(*_, **__):
        raise gsd_unsupported("model: a kind that is not served; or let transformers serve it: model.generate")

    from gsd_kernels_hf.exported import call
    from gsd_kernels_hf.validate import Unsupported as gsd_unsupported

    monkeypatch.setattr(call, "patch", refuse)
    assert torch.equal(model.generate(prompt["input_ids"], **CALL), plain)
    assert "transformers' own generate serves this model: model: a kind that is not served" in caplog.text
    with pytest.raises(ValueError, match="graph_config: this call goes to transformers"):
        model.generate(**prompt, **CALL, graph_config="tree")


HEAD = '{"format": "gsd_kernels model folder", "version": '
DAMAGED = {
    "no JSON": ("{", "is damaged"),
    "another file": ('{"format": "x", "version": 1}', "is none of gsd_kernels"),
    "newer": (HEAD + "2}", "has version 2, unknown.*update the package"),
    "unknown": (HEAD + '1, "x": 1}', "the option 'x', unknown"),
    "no shape": (HEAD + '1, "graph_config": {"depth": -1}}', "gsd_kernels.json is damaged .depth"),
    "outside": (HEAD + '1, "drafter": "../x"}', "expected 'drafter', a folder"),
    "absent": (HEAD + '1, "draft_heads": "heads"}', "expected 'heads', a folder"),
}
LOST = {
    "moved": (lambda here: here.rename(here.parent / "there"), "no such folder: ./here"),
    "another working directory": (lambda here: os.chdir("/"), "no such folder: ./here"),
    "weights cut short": (
        lambda here: replaced(here / "draft" / "model.safetensors", "x" * 50),
        "header|incomplete|deserializing",
    ),
    "no tokens of the draft's": (lambda here: shutil.rmtree(here / "draft"), "expected 'draft', a folder in"),
    **{
        name: (lambda here, text=text: replaced(here / FILE, text), message)
        for name, (text, message) in DAMAGED.items()
    },
}


def replaced(file: Path, text: str) -> None:
    file.unlink()  # the others' is the same
    file.write_text(text, encoding="utf-8")


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
    if name in DAMAGED:
        door = {"custom_generate": str(here), "trust_remote_code": True}
        with pytest.raises(ValueError, match=f"(?s){message}"):
            loaded(here, None).generate(**prompt, **CALL, **door)
    with gsd.patch(model) as handle:
        assert torch.equal(model.generate(**prompt, **CALL), plain) and handle.stats.steps


def test_a_folder_without_options_drafts_from_the_text(exported, tmp_path, prompt, plain):
    """Somebody put ``custom_generate/`` into a model's repository."""
    folder = copied(exported, tmp_path / "bare")
    (folder / FILE).unlink()
    model = loaded(folder)
    assert torch.equal(model.generate(**prompt, **CALL), plain)
    assert set(handle_of(model).stats.sources) == {"history"}


# ``model.generate(…, custom_generate=FOLDER, trust_remote_code=True)``, by transformers itself.


FOLDER = gsd.custom_generate_folder()
DOOR = {"custom_generate": FOLDER, "trust_remote_code": True}
SHORT = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def target():
    return tiny()


OPTIONS = {
    "greedy": {},
    "tree of a draft": {"assistant_model": ..., "graph_config": "tree"},
    "of one's own": {
        "logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)]),
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(17)]),
        "bad_words_ids": [[5], [7, 9]],
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_writes_the_models_own_text(options, target):
    inputs, variables = prompts(2, 9), set(vars(target))
    drafts = {name: noised(target) if value is ... else value for name, value in options.items()}
    theirs = {name: value for name, value in options.items() if value is not ... and name != "graph_config"}
    expected = target.generate(**inputs, **SHORT, **theirs)
    out = target.generate(**inputs, **SHORT, **drafts, **DOOR, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    assert out.stats.steps > 0 and set(vars(target)) == variables


def test_a_patched_model_takes_it_too(target):
    inputs = prompts(1, 9)
    expected = target.generate(**inputs, **SHORT)
    with gsd.patch(target, assistant_model=noised(target)):
        assert torch.equal(target.generate(**inputs, **SHORT, **DOOR), expected)
        assert torch.equal(type(target).generate(target, **inputs, **SHORT, **DOOR), expected)


def test_modes_that_are_not_served_are_refused_by_name(target):
    with pytest.raises(ValueError, match="num_beams"):
        target.generate(**prompts(1, 9), **SHORT, **DOOR, num_beams=2)


@pytest.mark.skipif(
    "has_local_code=False" not in inspect.getsource(GenerationMixin.load_custom_generate),
    reason="this transformers runs the code of any local folder",
)
def test_it_runs_for_those_alone_who_trust_it(target):
    with pytest.raises(ValueError, match="trust_remote_code"):
        target.generate(**prompts(1, 9), **SHORT, custom_generate=FOLDER, trust_remote_code=False)


def test_without_the_package_the_error_names_the_cure(target, tmp_path, monkeypatch):
    """From a copy, of which transformers has no module yet."""
    folder = tmp_path / "copied"
    (folder / "custom_generate").mkdir(parents=True)
    for file in (Path(FOLDER) / "custom_generate").iterdir():
        if file.is_file():
            (folder / "custom_generate" / file.name).write_bytes(file.read_bytes())
    call = {**prompts(1, 9), **SHORT, "custom_generate": str(folder), "trust_remote_code": True}
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gsd_kernels", None)
        with pytest.raises(ImportError, match=r"not installed here, or too old.*pip install"):
            target.generate(**call)
        old = type(sys)("gsd_kernels")
        patch.setitem(sys.modules, "gsd_kernels", old)
        with pytest.raises(ImportError, match="or too old"):
            target.generate(**call)
    assert torch.equal(target.generate(**call), target.generate(**prompts(1, 9), **SHORT))


def test_every_option_of_the_card_is_one(target):
    listed = re.findall(r"^- `(\w+)`", Path(FOLDER, "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) >= 6 and set(listed) <= set(gsd.GraphDecoder.__dataclass_fields__)
    with pytest.raises(TypeError, match=r"came twice|too many"):
        custom_generate(prompts(1, 9)["input_ids"], None, model=target, generation_config=None)


# ``gsd-kernels export``: what goes into the folder, and what is refused.


def run(*arguments):
    return CliRunner().invoke(app, ["export", *(str(a) for a in arguments)])


def exports(folder, *arguments) -> dict:
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
    found = exports(folder, "--model", models / "target", *parts, "--graph-config", "graph,depth=3,history_depth=2")
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
    found = exports(tmp_path / "out", "--model", tmp_path / "own", "--drafter", "mtp")
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
