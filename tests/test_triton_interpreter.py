"""Runs tests/interpreter in triton's interpreter: the variable must be set before triton is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
DIRECTORY = Path(__file__).parent / "interpreter"


def test_every_triton_op_in_the_interpreter():
    inherited = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")}  # this may be an xdist worker
    environment = {**inherited, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(DIRECTORY), "-n", "2", "-p", "no:cacheprovider"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, cwd=DIRECTORY.parent)
    passed = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0 and passed, run.stdout[-20000:] + run.stderr[-2000:]
    assert int(passed[1]) > 60, f"only {passed[1]} tests were collected"
