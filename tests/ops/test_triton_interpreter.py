"""Runs the interpreter's cases in triton's interpreter: the variable must be set before triton is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
FILES = {  # and how many cases each has at least
    "attention": 33,
    "graph_ops": 87,
    "sampling_ops": 18,
    "kv_ops": 60,
    "ngram": 16,
    "triton_dispatch": 19,
    "guard_pages": 7,
    "interpreted_model": 2,
}


@pytest.mark.parametrize("name", FILES)
def test_in_the_interpreter(name):
    inherited = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")}  # this may be an xdist worker
    environment = {**inherited, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(HERE / f"test_{name}.py"),
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, cwd=HERE.parents[1])
    passed = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0 and passed, run.stdout[-20000:] + run.stderr[-2000:]
    assert int(passed[1]) >= FILES[name], f"only {passed[1]} cases ran"
    assert "skipped" not in run.stdout


def test_every_file_with_such_cases_is_listed():
    named = {
        p.stem.removeprefix("test_")
        for p in HERE.glob("test_*.py")
        if '"interpreter"' in (text := p.read_text()) or "mark.interpreter" in text
    }
    assert named - {"triton_interpreter"} == set(FILES)
