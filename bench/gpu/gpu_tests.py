"""Tests marked ``gpu``, the ones that say most first, for as long as there is time.

All of them compile some hundred variants of the Triton kernels, more than a stage has time for. So their order is

1. of every test and backend the one case that is nearest to what runs in a decoding step: each kernel once;
2. captured steps against uncaptured ones, token for token: what no CPU can show and losslessness rests on;
3. every further case, in turn over tests and backends, so that one test with hundreds of shapes keeps none waiting.

Every test is a point, by its id. What passed is not run again.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from gsd_kernels_hf.model.replay import lost

from .stages import ROOT
from .work import Work

FILES = (
    *("tests/ops", "tests/backends", "tests/engine/test_captured_step.py"),
    *("tests/engine/test_fused_on_gpu.py", "tests/sources/test_forwards.py"),
)
FILES_WITHOUT_GPU = ("tests/ops/test_step_ops.py", "tests/engine/test_captured_step.py")  # collected in seconds
CAPTURED = re.compile(r"captur")
#: Of a test's cases the first one is run whose id matches the earliest of these: the dtype and head size of the models
#: that are measured; then the dtype alone; then whatever comes first.
NEAREST = (re.compile(r"bfloat16.*D128|D128.*bfloat16"), re.compile(r"bfloat16"))


def ordered(ids: Sequence[str]) -> list[str]:
    """Test ids by worth."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in ids:
        test, _, case = name.partition("[")
        groups[test, re.split(r"[-\]]", case)[0]].append(name)
    places: dict[str, float] = {}
    for (test, _), cases in groups.items():
        first = min(cases, key=distance)
        order = [first, *(case for case in cases if case != first)]
        places |= {case: 0.5 if CAPTURED.search(test) else turn for turn, case in enumerate(order)}
    return sorted(ids, key=places.__getitem__)


def distance(case: str) -> int:
    """How far a case is from what a decoding step runs."""
    return next((place for place, pattern in enumerate(NEAREST) if pattern.search(case)), len(NEAREST))


class Plugin:
    """Orders pytest's items, ends in time, and keeps every outcome."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.begin = 0.0
        self.left: list[str] = []
        self.lost: str | None = None  # what the GPU says that failed for good

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        by_id = {item.nodeid: item for item in items}
        self.left = [name for name in ordered(list(by_id)) if not self.work.is_done(name)]
        items[:] = [by_id[name] for name in self.left]

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
            self.left = [name for name in self.left if name != report.nodeid]
            self.work.waiting = self.left
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
    options = ["-m", "gpu", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers", "--rootdir", str(ROOT)]
    options.append("--continue-on-collection-errors")
    files = [str(ROOT / file) for file in (FILES_WITHOUT_GPU if work.rehearse else FILES)]
    work.points = {name: point for name, point in work.points.items() if not name.startswith("collecting ")}
    plugin = Plugin(work)
    code = pytest.main([*options, "-v", "--tb=short", *files], plugins=[plugin])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        if code == pytest.ExitCode.NO_TESTS_COLLECTED and work.points:
            return  # all of them passed before
        raise RuntimeError(f"pytest ended with {code!r}: see the log")
