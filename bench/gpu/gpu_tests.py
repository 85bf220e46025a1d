"""Tests marked ``gpu``, the ones that say most first, for as long as there is time.

All of them compile some hundred variants of the Triton kernels, more than a stage has time for. So their order is

1. of every test and backend the one case that is nearest to what runs in a decoding step: each kernel once;
2. captured steps against uncaptured ones, token for token: what no CPU can show and losslessness rests on;
3. every further case, in turn over tests and backends, so that one test with hundreds of shapes keeps none waiting.

Every test is a point, by its id. What passed is not run again.

And the operator's tests under compute-sanitizer: memory, races in shared memory, barriers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gsd_kernels_hf.model.replay import lost

from .stages import ROOT
from .work import Work, points

FILES = (
    *("tests/ops", "tests/backends", "tests/engine/test_captured_step.py"),
    *("tests/engine/test_fused_on_gpu.py", "tests/sources/test_forwards.py"),
)
FILES_WITHOUT_GPU = ("tests/ops/test_step_ops.py", "tests/engine/test_captured_step.py")  # collected in seconds
CAPTURED = re.compile(r"captur")
#: Of a test's cases the first one is run whose id matches the earliest of these: the dtype and head size of the models
#: that are measured; then the dtype alone; then whatever comes first.
NEAREST = (re.compile(r"bfloat16.*D128|D128.*bfloat16"), re.compile(r"bfloat16"))

TOOLS = ("memcheck", "racecheck", "synccheck")
SANITIZED = "tests/backends/test_decoder.py"
#: A test each of what a call launches, ends of tiles and splits, storage outside; quick, as each is slowed manyfold.
CHOSEN = "equals_the_reference or many_rows_have_the_bits or not_touched or packed_matrices_have_the_bits"
FOUND = 86  # exit code of a tool that found something
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def ordered(ids: Sequence[str]) -> list[str]:
    """Test ids by worth."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in ids:
        test, _, case = name.partition("[")
        groups[test, re.split(r"[-\]]", case)[0]].append(name)
    places: dict[str, float] = {}
    for (test, _), cases in groups.items():
        # The nearest one to what a decoding step runs.
        first = min(cases, key=lambda case: [pattern.search(case) is None for pattern in NEAREST])
        order = [first, *(case for case in cases if case != first)]
        places |= {case: 0.5 if CAPTURED.search(test) else turn for turn, case in enumerate(order)}
    return sorted(ids, key=places.__getitem__)


class Plugin:
    """Orders pytest's items, ends in time, and keeps every outcome."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.begin = 0.0
        self.lost: str | None = None  # what the GPU says that failed for good

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        by_id = {item.nodeid: item for item in items}
        self.work.waiting = [name for name in ordered(list(by_id)) if not self.work.is_done(name)]
        items[:] = [by_id[name] for name in self.work.waiting]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if self.lost is None and self.work.left() >= self.work.slowest:
            return None
        item.session.shouldstop = (
            "out of time; goes on in the next call" if self.lost is None else f"the GPU is unusable: {self.lost}"
        )
        return True  # nothing else runs it

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # the other files are run all the same
            self.work.keep(f"collecting {report.nodeid}", {"error": str(report.longrepr)[-1500:]})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.begin = time.monotonic()
        self.work.points[nodeid] = {"error": "was running when the stage ended"}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            seconds = time.monotonic() - self.begin
            self.work.slowest = max(self.work.slowest, seconds)
            record: dict[str, Any] = {"outcome": report.outcome, "seconds": round(seconds, 3)}
            if report.outcome == "failed":
                record["error"] = str(report.longrepr)[-1500:]
                self.lost = lost(self.work.device)
            elif report.outcome == "skipped" and isinstance(report.longrepr, tuple):
                record["reason"] = report.longrepr[2]
            self.work.waiting = [name for name in self.work.waiting if name != report.nodeid]
            self.work.keep(report.nodeid, record)


def run(work: Work) -> None:
    """Points by test id: outcome and seconds.

    Raises:
        RuntimeError: tests cannot be collected.
    """
    if work.rehearse:
        work.skip("what a GPU test does: without a GPU it skips; of the others' files only some are collected")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    # The project's own options need plugins that a GPU machine may lack.
    options = [
        *("-m", "gpu", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers", "--rootdir", str(ROOT)),
        *("--continue-on-collection-errors", "-v", "--tb=short"),
    ]
    options += [str(ROOT / file) for file in (FILES_WITHOUT_GPU if work.rehearse else FILES)]
    work.points = {name: point for name, point in work.points.items() if not name.startswith("collecting ")}
    code = pytest.main(options, plugins=[Plugin(work)])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        if code == pytest.ExitCode.NO_TESTS_COLLECTED and work.points:
            return  # all of them passed before
        raise RuntimeError(f"pytest ended with {code!r}: see the log")


def sanitize(work: Work) -> None:
    """Points by tool."""
    program, nvcc = shutil.which("compute-sanitizer"), shutil.which("nvcc")
    if program is None and nvcc is not None:  # it lies beside it
        program = shutil.which("compute-sanitizer", path=Path(nvcc).resolve().parent)
    tools = points("{tool}", tool=TOOLS)
    if work.rehearse:
        work.skip("compute-sanitizer: there is no GPU")
    elif program is None:
        work.skip("compute-sanitizer: it is not installed")
        return work.each(tools, lambda _: {"missing": "compute-sanitizer"})
    return work.each(tools, lambda tool: check(work, str(program), tool))


def check(work: Work, program: str, tool: str) -> dict[str, Any]:
    """Run the tests under a tool; how many there were.

    Raises:
        RuntimeError: it found something, a test failed, none ran, or it did not end.
    """
    options = ["-q", "-x", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers", "-m", "gpu", "-k", CHOSEN]
    tests = ["-m", "pytest", *options, *(["--collect-only"] * work.rehearse), str(ROOT / SANITIZED)]
    under = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--kernel-regex", "kns=gsd"]
    command = [*under * (not work.rehearse), sys.executable, *tests]
    # The allocator of PyTorch cuts tensors from large pieces of memory, whose ends no tool sees.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    seconds = max(1.0, work.left())
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    code, output = done.returncode, done.stdout
    print(output[-3000:], done.stderr[-1000:], flush=True)
    errors = [int(number) for number in SUMMARY.findall(output)]
    passed = re.search(r"(\d+)(?:/\d+)? tests? collected" if work.rehearse else r"(\d+) passed", output)
    if code or any(errors) or passed is None or not (errors or work.rehearse):
        kind = "found something" if code == FOUND or any(errors) else "did not end well"
        raise RuntimeError(f"{kind}, exit code {code}: {output[-700:]}")
    return {"tests": int(passed.group(1)), "errors": 0}
