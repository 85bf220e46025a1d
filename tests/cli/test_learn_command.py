"""``gsd-kernels learn``: a file that later calls find, of the package's prompts or one's own."""

from __future__ import annotations

import json

import pytest
from checkpoints import save_pair
from terminal import one_line_error, run

from gsd_kernels_hf import learning


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


def test_files_that_do_not_serve_are_named(target, tmp_path):
    assert "--prompts" in one_line_error(run("learn", target, "--prompts", tmp_path / "none.txt"), 1)
    says = f"file: expected the name of a file to write, got the folder {tmp_path}"
    assert says in one_line_error(run("learn", target, "-o", tmp_path), 2)
