"""The block code of csrc/graph as T threads: no races, no bad accesses, and a dropped barrier is noticed.

Blind to what only a GPU has: warps, fences, races between blocks, asynchronous copies.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "tests/block_code/main.cpp"
HEADERS = sorted((ROOT / "csrc/graph").glob("*.h"))
CXX = shutil.which(os.environ.get("CXX", "g++"))
BUILDS = {
    "thread": ["-O1", "-g", "-fsanitize=thread"],
    "address": ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DGSD_CHECK_DIVERGENCE"],
}
DIFFERENT, DIVERGENT, RACE = 3, 4, 66
HUNG = "hung"

pytestmark = [
    pytest.mark.skipif(CXX is None, reason="no C++ compiler (CXX, g++)"),
    pytest.mark.skipif(not SOURCE.exists() or not HEADERS, reason="not a source checkout"),
]

BARRIERS = sorted({name for header in HEADERS for name in re.findall(r'sync\("([^"]+)"\)', header.read_text())})


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("block_code")

    def build(name: str) -> Path:
        flags = ["-std=c++20", "-pthread", "-Wall", "-Wextra", "-ffp-contract=off", *BUILDS[name]]
        subprocess.run([CXX, *flags, str(SOURCE), "-o", str(folder / name)], check=True)
        return folder / name

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(BUILDS, pool.map(build, BUILDS), strict=True))


def run(program: Path, *arguments: object, timeout: float = 120) -> tuple[int | str, str]:
    environment = {**os.environ, "TSAN_OPTIONS": f"exitcode={RACE} halt_on_error=1", "ASAN_OPTIONS": "exitcode=67"}
    try:
        done = subprocess.run(
            [str(program), *map(str, arguments)], capture_output=True, text=True, timeout=timeout, env=environment
        )
    except subprocess.TimeoutExpired:
        return HUNG, ""
    return done.returncode, done.stderr


@pytest.mark.parametrize("threads", [8, 32])
@pytest.mark.parametrize("sanitizer", BUILDS)
def test_a_block_equals_one_thread_and_is_clean(programs, sanitizer, threads):
    rounds = 1600 // threads
    status, output = run(programs[sanitizer], threads, rounds, 1)
    assert status == 0, output[-3000:]


@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_dropped_barrier_is_caught(programs, barrier):
    status, output = run(programs["thread"], 8, 40, 2, "--drop", barrier)
    assert status in (RACE, DIFFERENT), (status, output[-2000:])


@pytest.mark.parametrize("atomic", ["atomic_or", "atomic_add"])
def test_an_atomic_made_plain_is_caught(programs, atomic):
    status, output = run(programs["thread"], 8, 40, 3, "--plain", atomic)
    assert status == RACE, (status, output[-2000:])


def test_threads_at_different_barriers_are_caught(programs):
    status, output = run(programs["address"], 8, 0, 1, "--diverge")
    assert status == DIVERGENT and "divergent barrier" in output


def test_every_barrier_of_the_headers_is_listed():
    calls = sum(header.read_text().count("group.sync(") for header in HEADERS)
    assert calls == len(BARRIERS) >= 13, "two barriers share a name, or one is not a literal"
