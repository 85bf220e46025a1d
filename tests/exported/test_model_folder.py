"""A folder that ``gsd-kernels export`` wrote, in the hands of those who load model folders: nobody names us."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from exported.loading import CALL, loaded

import gsd_kernels as gsd
from gsd_kernels_hf.api import handle_of
from gsd_kernels_hf.exported.call import CALLS
from gsd_kernels_hf.exported.options import FILE


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
