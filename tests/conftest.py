"""Tests leave nothing behind: measured step costs go to a directory of their own. One thread for each process.

A run of many files ends with the slowest ones.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
from _pytest.terminal import TerminalReporter

torch.set_num_threads(1)  # the models are tiny, and several test processes share the cores
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # of the processes that tests start
    os.environ.setdefault(variable, "1")
pytest.register_assert_rewrite("ops.contracts")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where triton is interpreted, the interpreter's cases run and no others; elsewhere all but these."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    others = [item for item in items if (item.get_closest_marker("interpreter") is not None) != interpreted]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """The ten slowest files, so that a suite that grows slower shows where."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) > 10:
        terminalreporter.section("slowest files: seconds, with their fixtures")
        for file, spent in seconds.most_common(10):
            terminalreporter.write_line(f"{spent:7.1f}  {file}")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GSD_KERNELS_CACHE", str(tmp_path_factory.mktemp("gsd-cache")))
        yield
