"""The embedded pair as a model folder, exported once a run, and a module cache of the tests' own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from exported.loading import CALL, TEXT, keep_modules, loaded
from shared import once
from transformers import AutoTokenizer
from typer.testing import CliRunner

from gsd_kernels_cli import demo
from gsd_kernels_cli.app import app

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
