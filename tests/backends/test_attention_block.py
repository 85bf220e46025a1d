"""The attention kernel's source on the CPU: right, and free of races, bad accesses and bank conflicts.

Every lane is a fiber; tests/block_code/fiber_machine.h does what the PTX ISA says of ldmatrix, mma and cp.async. Faults
are injected one at a time, and each must be noticed.
"""

from __future__ import annotations

import re

import pytest
from block_code.programs import DIFFERENT, DIVERGENT, RACE, ROOT, build_mutated, needs, programs_of, run

SOURCE = ROOT / "tests/block_code/attention.cpp"
HEADER = ROOT / "csrc/algorithms/attention_tiles.h"
BANK_CONFLICT = 5

pytestmark = [pytest.mark.long, *needs(SOURCE, HEADER)]

TEXT = HEADER.read_text() if HEADER.exists() else ""
BARRIERS = re.findall(r'machine\.(?:sync|any)\("([^"]+)"', TEXT)
WAITS = re.findall(r'machine\.template wait<[^>]+>\("([^"]+)"\)', TEXT)
COPIES = re.findall(r'machine\.copy\("([^"]+)"', TEXT)
LOADS = re.findall(r'machine\.template load_matrices<\w+>\("([^"]+)"', TEXT)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return programs_of(tmp_path_factory, SOURCE)


@pytest.mark.parametrize(("sanitizer", "rounds"), [("thread", 12), ("address", 40)])
def test_random_problems_are_right_and_clean(programs, sanitizer, rounds):
    """Types, head sizes, groups, ragged lengths, padding, windows, chunks, soft caps, sinks, empty rows, NaN in slots.

    Held against double precision; every third round also checks that rows are independent bit for bit.
    """
    status, output = run(programs[sanitizer], rounds, 1, timeout=300)
    assert status == 0, output[-3000:]


@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_dropped_barrier_is_caught(programs, barrier):
    status, output = run(programs["thread"], 12, 2, "--drop", barrier)
    # Threads that disagree about a spoiled tile also go different ways, which the machine notices by itself.
    assert status in (RACE, DIFFERENT, DIVERGENT), (status, output[-2000:])


@pytest.mark.parametrize("wait", WAITS)
def test_a_dropped_wait_is_caught(programs, wait):
    assert run(programs["address"], 4, 2, "--hurry", wait)[0] == DIFFERENT


@pytest.mark.parametrize(("side", "name"), [*(("copy", name) for name in COPIES), *(("load", name) for name in LOADS)])
def test_a_wrong_place_on_one_side_is_caught(programs, side, name):
    assert run(programs["address"], 4, 2, f"--misplace-{side}", name)[0] == DIFFERENT


def test_a_layout_without_exchanged_chunks_has_bank_conflicts(tmp_path):
    """Right results, but eight rows in one group of banks."""
    assert TEXT.count("chunk ^ (row & 7)") == 1
    build_mutated(SOURCE, tmp_path, {HEADER: TEXT.replace("chunk ^ (row & 7)", "chunk")})
    status, output = run(tmp_path / "mutated", 1, 1)
    assert status == BANK_CONFLICT and "bank conflict" in output


def test_every_barrier_wait_copy_and_load_is_listed():
    found = {"sync(": 4, "any(": 1, "wait<": 2, "copy(": 3, "load_matrices<": 3}
    for call, count in found.items():
        assert len(re.findall(rf"machine\.(?:template )?{re.escape(call)}", TEXT)) == count, call
    assert len(set(BARRIERS)) == len(BARRIERS) == 5 and len(set(WAITS)) == len(WAITS) == 2
    assert set(COPIES) == set(LOADS) == {"queries", "keys", "values"}
