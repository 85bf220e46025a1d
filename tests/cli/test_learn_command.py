"""``gsd-kernels learn``: a file that later calls find, of the package's prompts or one's own."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from checkpoints import byte_tokenizer, save_pair
from gguf_files import tiny as packed_tiny
from gguf_files import write_gguf
from models import tiny
from terminal import one_line_error, run

from gsd_kernels_cli import pair
from gsd_kernels_hf import learning, progress


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "cache"))
    return save_pair(tmp_path)[0]


def test_own_prompts_and_texts_leave_a_file_that_generate_uses(target, tmp_path):
    (tmp_path / "asked.txt").write_text("one two\n\nthree\n")
    (tmp_path / "read.txt").write_text("one two three one two three")
    plain = run("generate", "one two", "--model", target, "--max-new-tokens", 12, "--no-stream")
    arguments = ("--prompts", tmp_path / "asked.txt", "--texts", tmp_path / "read.txt", "--max-new-tokens", 12)
    done = run("learn", target, *arguments, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["bytes"] > 0 and report["file"].startswith(str(tmp_path / "cache"))
    again = run("generate", "one two", "--model", target, "--max-new-tokens", 12, "--no-stream")
    assert again.exit_code == 0 and again.stdout == plain.stdout


def test_without_prompts_those_of_the_package_are_asked(target, tmp_path, monkeypatch):
    monkeypatch.setattr(learning, "everyday_prompts", lambda: ["one", "two"])
    done = run("learn", target, "--max-new-tokens", 4, "-o", tmp_path / "own.safetensors")
    assert done.exit_code == 0 and f"{tmp_path / 'own.safetensors'}: 0.0" in done.stdout
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").glob("learned-*"))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "packed"])
def test_other_families_dense_and_packed(family, tmp_path, monkeypatch):
    """One command learns, the next ones find it and write what they wrote before."""
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "cache"))
    words, model = byte_tokenizer(), tmp_path / "model"
    model.mkdir()
    if family == "packed":
        model = write_gguf(model / "m.gguf", packed_tiny("llama", vocab_size=len(words)), "llama", ["q8_0", "q4_0"])
        monkeypatch.setattr(pair, "load_tokenizer", lambda *_, **__: words)
    else:
        tiny(family, vocab_size=len(words), dtype=torch.float32).save_pretrained(model)
        words.save_pretrained(model)
    (tmp_path / "asked.txt").write_text("one two three\nfour five\n")
    asking = ("generate", "one two three", "--model", model, "--max-new-tokens", 16, "--no-stream")
    before = run(*asking)
    done = run("learn", model, "--prompts", tmp_path / "asked.txt", "--max-new-tokens", 16)
    assert before.exit_code == done.exit_code == 0, done.output
    assert [file.name in done.stdout for file in (tmp_path / "cache").glob("learned-*")] == [True]
    after = run(*asking)
    assert after.stdout == before.stdout and "which cannot be used" not in after.stderr


def test_an_interrupt_keeps_what_is_there_and_progress_is_told(target, tmp_path, monkeypatch, caplog):
    answer, calls = learning.generate, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return answer(*args, **kwargs)

    monkeypatch.setattr(learning, "generate", interrupted)
    monkeypatch.setattr(progress, "WAIT_SECONDS", 0.0)
    (tmp_path / "asked.txt").write_text("one\ntwo\nthree\nfour\n")
    done = run("learn", target, "--prompts", tmp_path / "asked.txt", "--max-new-tokens", 12)
    assert done.exit_code == 0 and "interrupted after 2 of 4 prompts; what is there is kept" in caplog.text
    assert "learning: 1 of 4 prompts, 12 tokens" in done.stderr
    (file,) = (tmp_path / "cache").glob("learned-*")
    assert str(file) in done.stdout


def test_files_that_do_not_serve_are_named(target, tmp_path):
    assert "--prompts" in one_line_error(run("learn", target, "--prompts", tmp_path / "none.txt"), 1)
    says = f"file: expected the name of a file to write, got the folder {tmp_path}"
    assert says in one_line_error(run("learn", target, "-o", tmp_path), 2)
