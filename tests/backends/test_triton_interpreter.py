"""Runs the interpreter's cases in triton's interpreter: the variable must be set before triton is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = [pytest.mark.quick, pytest.mark.long, pytest.mark.slow]

TESTS = Path(__file__).parents[1]
FILES = {
    "ops": ("dag_attention", "graph_ops", "sample_rows", "step_ops", "ngram"),
    "backends": ("triton_dispatch", "guard_pages", "interpreted_model"),
}
LEAST = 200 if os.environ.get("EVERY") else 70  # cases


def test_in_the_interpreter():
    inherited = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")}  # this may be an xdist worker
    environment = {**inherited, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    files = [str(TESTS / folder / f"test_{name}.py") for folder, names in FILES.items() for name in names]
    command = [sys.executable, "-m", "pytest", *files, "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, cwd=TESTS.parent)
    passed = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0 and passed, run.stdout[-20000:] + run.stderr[-2000:]
    assert int(passed[1]) >= LEAST and "skipped" not in run.stdout, f"only {passed[1]} cases ran"


def test_every_file_with_such_cases_is_listed():
    marked = re.compile(r'"interpreter"|mark\.interpreter')
    for folder, names in FILES.items():
        found = [path for path in (TESTS / folder).glob("test_*.py") if marked.search(path.read_text())]
        assert {path.stem.removeprefix("test_") for path in found if path != Path(__file__)} == set(names)
