"""A short soak; ``python tests/engine/soak.py 1000`` is the long one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

GENERATIONS = 80
GROWTH = 24.0  # MiB; a session that is left behind at every call would be above 70


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_two_threads_and_many_calls_leave_memory_as_it_was():
    script = str(Path(__file__).with_name("soak.py"))
    run = subprocess.run([sys.executable, script, str(GENERATIONS)], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["generations"] == GENERATIONS and found["wrong"] == 0
    memory = found["resident_mib"]
    assert memory[-1] - max(memory[:4]) < GROWTH, memory  # it goes up and down by 20 as sessions come and go
