"""The operator's GPU tests under compute-sanitizer: memory, races in shared memory, barriers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from .stages import ROOT
from .work import Work, points

TOOLS = ("memcheck", "racecheck", "synccheck")
#: A test each of what a call launches, ends of tiles and splits, storage outside; quick, as each is slowed manyfold.
TESTS = {
    "tests/backends/test_decoder.py": (
        "equals_the_reference or many_rows_have_the_bits or not_touched or packed_matrices_have_the_bits"
    ),
}
FOUND = 86  # exit code of a tool that found something
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def run(work: Work) -> None:
    """Points by tool."""
    program = sanitizer()
    if work.rehearse or program is None:
        work.skip("compute-sanitizer: " + ("there is no GPU" if work.rehearse else "it is not installed"))
    tools = points("{tool}", tool=TOOLS)
    if program is None and not work.rehearse:
        return work.each(tools, lambda _: {"missing": "compute-sanitizer"})
    # The allocator of PyTorch cuts tensors from large pieces of memory, whose ends no tool sees.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return work.each(tools, lambda tool: check(work, [] if work.rehearse else command(program, tool), environment))


def sanitizer() -> str | None:
    """Where compute-sanitizer is: on the path, or beside nvcc."""
    nvcc = shutil.which("nvcc")
    beside = None if nvcc is None else Path(nvcc).resolve().with_name("compute-sanitizer")
    return shutil.which("compute-sanitizer") or (str(beside) if beside is not None and beside.exists() else None)


def command(program: str | None, tool: str) -> list[str]:
    return [str(program), "--tool", tool, "--error-exitcode", str(FOUND), "--kernel-regex", "kns=gsd"]


def check(work: Work, under: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run the tests under a tool.

    Raises:
        RuntimeError: it found something, a test failed, none ran, or it did not end.
    """
    ((file, chosen),) = TESTS.items()
    tests = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers", "-m", "gpu"]
    whole = [*under, sys.executable, *tests, "-k", chosen, *(["--collect-only"] * work.rehearse), str(ROOT / file)]
    done = subprocess.run(
        whole, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=max(1.0, work.left())
    )
    print(done.stdout[-3000:], done.stderr[-1000:], flush=True)
    return verdict(done.returncode, done.stdout, ran=not work.rehearse)


def verdict(code: int, output: str, *, ran: bool = True) -> dict[str, Any]:
    """The verdict of a tool and the tests together.

    Raises:
        RuntimeError: it is not that all is well.
    """
    summary = SUMMARY.findall(output)
    passed = re.search(r"(\d+) passed" if ran else r"(\d+)(?:/\d+)? tests? collected", output)
    if code or any(int(number) for number in summary) or passed is None or (ran and not summary):
        kind = "found something" if code == FOUND or any(map(int, summary)) else "did not end well"
        raise RuntimeError(f"{kind}, exit code {code}: {output[-700:]}")
    return {"tests": int(passed.group(1)), "errors": 0}
