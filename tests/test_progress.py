"""Progress: lines of a log with totals, also while nothing is done, and a bar on a terminal."""

from __future__ import annotations

import io
import sys
import time
from contextlib import redirect_stderr

import pytest

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
