"""Progress: lines of a log with totals, also while nothing is done, and a bar on a terminal."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from contextlib import redirect_stderr

import pytest
from checkpoints import save_pair
from typer.testing import CliRunner

from gsd_kernels_cli.app import app
from gsd_kernels_hf import progress
from gsd_kernels_hf.progress import tracked


@pytest.fixture
def at_once(monkeypatch):
    for name, seconds in (("WAIT_SECONDS", 0.0), ("LINE_SECONDS", 0.0), ("LOOK_SECONDS", 3600.0)):
        monkeypatch.setattr(progress, name, seconds)


def test_lines_have_totals_and_notes(at_once, caplog):
    caplog.set_level("INFO", logger="gsd_kernels.progress")
    with tracked("working", 1200, "tokens") as update:
        update(5)
        update(1100, "soon over")
    with tracked("working", None, "steps") as update:
        update(7)
    assert caplog.messages == [
        "working: 5 of 1,200 tokens, 0 s so far",
        "working: 1,100 of 1,200 tokens, soon over, 0 s so far",
        "working: 7 steps, 0 s so far",
    ]


def test_lines_come_while_nothing_is_done(at_once, monkeypatch):
    said = threading.Event()
    monkeypatch.setattr(progress, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(progress.logger, "info", lambda *_: said.set())
    with tracked("working", 3, "runs"):
        assert said.wait(30)
    assert not [t for t in threading.enumerate() if t.name == "gsd_kernels.progress"]


def test_what_is_quick_says_nothing(caplog):
    caplog.set_level("INFO", logger="gsd_kernels.progress")
    with tracked("working", 3, "runs") as update:
        update(3)
    assert caplog.messages == []


def test_a_terminal_gets_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    terminal, until = sys.stderr, time.monotonic() + 10
    with tracked("working [INST]", 3, "runs") as update, redirect_stderr(io.StringIO()):
        update(2, "the [last]")  # seen while what runs is silenced
        while "2 of 3 runs, the [last]" not in (said := terminal.getvalue()) and time.monotonic() < until:
            time.sleep(0.02)
    assert "working [INST]" in said and "2 of 3 runs, the [last]" in said


def test_check_and_index_tell_their_totals(at_once, tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "cache"))
    save_pair(tmp_path)
    given = ["check", "--model", tmp_path / "target", "--draft", "history", "--max-new-tokens", 3, "a b a b", "c d"]
    result = CliRunner().invoke(app, [str(a) for a in [*given, "--json"]])
    assert result.exit_code == 0 and len(json.loads(result.stdout)["prompts"]) == 2
    lines = [line.rsplit(", ", 1)[0] for line in result.stderr.splitlines() if "decoding" in line]
    assert lines == [
        f"gsd-kernels: decoding 2 prompts, 3 times each: {said}"
        for said in (
            "0 of 6 runs, warming plain up",
            "0 of 6 runs, warming undrafted up",
            "0 of 6 runs, warming graph up",
            "0 of 6 runs, plain on prompt 1",
            "1 of 6 runs, undrafted on prompt 1",
            "2 of 6 runs, graph on prompt 1",
            "3 of 6 runs, undrafted on prompt 2",
            "4 of 6 runs, graph on prompt 2",
            "5 of 6 runs, plain on prompt 2",
        )
    ]
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number:02d}.txt").write_text("some words to index " * 2500)
    (texts / "99.bin").write_bytes(b"\xff" * 500_000)
    given = ["index", texts, "--out", tmp_path / "index", "--tokenizer", tmp_path / "target"]
    result = CliRunner().invoke(app, [str(a) for a in given])
    assert result.exit_code == 0, result.stderr
    lines = [line.rsplit(", ", 1)[0] for line in result.stderr.splitlines() if "indexing: " in line]
    assert lines == ["gsd-kernels: indexing: 1 of 2 MB", "gsd-kernels: indexing: 2 of 2 MB, sorting"]
