"""The source of the rows' CUDA kernels on the CPU: right, row-invariant, free of races and bad accesses.

As test_attention_block.py; besides, the splits of a product run at the same time, each as a block of its own, and what
the launch before writes is not there before a kernel waits for it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from block_code.programs import BUILDS, DIFFERENT, RACE, ROOT, build, build_mutated, needs, programs_of, run
from shared import once

SOURCE = ROOT / "tests/block_code/rows.cpp"
NAMES = ("rows", "rows_product", "rows_turn", "rows_heads", "rows_pair")
HEADERS = {name: ROOT / f"csrc/algorithms/{name}.h" for name in NAMES}

pytestmark = needs(SOURCE)

TEXTS = {name: path.read_text() if path.exists() else "" for name, path in HEADERS.items()}
#: Of the program.
PARTS = {
    "product": TEXTS["rows_product"],
    "between": TEXTS["rows_turn"] + TEXTS["rows_pair"],
    "turned": TEXTS["rows_heads"],
}


def named(call: str) -> list[tuple[str, str]]:
    """Part and name of every call of the machine that has a name."""
    pattern = rf'machine\.(?:template )?{call}\("([^"]+)"'
    return [(part, name) for part, text in PARTS.items() for name in re.findall(pattern, text)]


BARRIERS, WAITS, COPIES = named("(?:sync|any)"), named("wait<[^>]+>"), named("copy")
LOADS, AWAITS = named(r"load_matrices<\w+>"), named("await_previous")


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return programs_of(tmp_path_factory, SOURCE)


@pytest.mark.parametrize(("sanitizer", "rounds"), [("thread", 8), ("address", 16)])
@pytest.mark.parametrize("part", PARTS)
def test_random_problems_are_right_and_clean(programs, part, sanitizer, rounds):
    """Odd sizes, one to three matrices with and without bias, all ends, one to three splits; caches of both orders.

    Held against double precision; a row of every product must have the same bits alone, its splits in another order.
    Heads that a product turns have the bits of the contract's product, turned by a launch of its own.
    """
    status, output = run(programs[sanitizer], part, rounds // 2 if part == "turned" else rounds, 1, timeout=300)
    assert status == 0, output[-3000:]


@pytest.mark.parametrize(("sanitizer", "rounds"), [("thread", 4), ("address", 8)])
def test_packed_matrices_have_the_bits_of_their_dense_ones(programs, sanitizer, rounds):
    """Every kind, and dense matrices beside them, in the same odd sizes; nothing outside their rows is read."""
    status, output = run(programs[sanitizer], "packed", rounds, 1, timeout=300)
    assert status == 0, output[-3000:]


def test_a_row_has_the_same_bits_among_128(programs):
    status, output = run(programs["address"], "alone", 2, 3, timeout=300)
    assert status == 0, output[-3000:]


@pytest.mark.parametrize(("part", "barrier"), BARRIERS)
def test_a_dropped_barrier_is_caught(programs, part, barrier):
    status, output = run(programs["thread"], part, 8, 2, "--drop", barrier)
    assert status in (RACE, DIFFERENT), (status, output[-2000:])


@pytest.mark.parametrize(("part", "wait"), WAITS)
def test_a_dropped_wait_is_caught(programs, part, wait):
    assert run(programs["address"], part, 4, 2, "--hurry", wait)[0] == DIFFERENT


@pytest.mark.parametrize(("part", "name"), AWAITS)
def test_a_kernel_that_does_not_wait_for_the_launch_before_is_caught(programs, part, name):
    assert run(programs["address"], part, 2, 2, "--no-await", name)[0] == DIFFERENT


@pytest.mark.parametrize(("side", "name"), [*(("copy", name) for name in COPIES), *(("load", name) for name in LOADS)])
def test_a_wrong_place_on_one_side_is_caught(programs, side, name):
    part, place = name
    assert run(programs["address"], part, 2, 2, f"--misplace-{side}", place)[0] == DIFFERENT


#: Products into sums that begin at 0, which are added by an instruction of their own.
ADDED_LATE = (
    "[&] { float late[kRowTiles][4] = {}; machine.template multiply<Element>(late, 0, left[0], right); "
    "for (int j = 0; j < kRowTiles; j++) for (int i = 0; i < 4; i++) sums[j][i] += late[j][i]; }()"
)

#: Header, what it says, what it becomes; part of the program, and how that ends.
MUTATIONS = {
    "splits that depend on the row count": (
        *("rows", "wanted * output_blocks(kWideOutputs)", "wanted * tile_rows() * output_blocks(kWideOutputs)"),
        *("alone", DIFFERENT),
    ),
    "two steps of inputs swapped": ("rows_product", "32 * step", "32 * (step ^ 1)", "product", DIFFERENT),
    "a split that is not added": ("rows_product", "s < splits", "s < splits - 1", "alone", DIFFERENT),
    "splits that are added backwards": (
        "rows_product",
        "parts + s * kPart",
        "parts + (splits - s) * kPart",
        "alone",
        DIFFERENT,
    ),
    "a sine of the other sign": (
        *("rows_heads", "-machine.times(y, angle[1])", "machine.times(y, angle[1])", "between", DIFFERENT),
    ),
    "another pair": (
        *("rows_heads", "output & (t.head_dim - 1)", "((output & (t.head_dim - 1)) ^ 1)", "turned", DIFFERENT),
    ),
    "values among the keys": ("rows_heads", "(tile.matrix - 1) * t.kv_heads", "0 * t.kv_heads", "turned", DIFFERENT),
    "squares of a part of the head": ("rows_heads", "w < kWarps", "w < kWarps - 1", "turned", DIFFERENT),
    "a sum that is added behind its products": (
        *(
            "rows_product",
            "machine.template multiply<Element>(sums, 0, left[0], right)",
            ADDED_LATE,
            "product",
            DIFFERENT,
        ),
    ),
}


@pytest.fixture(scope="module")
def mutated(tmp_path_factory):
    def make(folder: Path) -> None:
        texts = dict(TEXTS)
        for number, (header, before, after, *_) in enumerate(MUTATIONS.values(), 1):
            assert TEXTS[header].count(before) == 1
            texts[header] = texts[header].replace(before, f"(mutation() == {number} ? {after} : {before})")
        build_mutated(SOURCE, folder, {HEADERS[name]: text for name, text in texts.items()})

    return once(tmp_path_factory, "rows_mutated", make) / "mutated"


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_changed_source_is_caught(mutated, mutation):
    *_, part, expected = MUTATIONS[mutation]
    rounds = 4 if part == "turned" else 1
    status, output = run(mutated, part, rounds, 1, mutation=list(MUTATIONS).index(mutation) + 1)
    assert status == expected, (status, output)
    assert run(mutated, part, rounds, 1)[0] == 0


def test_the_runtime_is_asked_once_about_a_kernel(tmp_path):
    program = build(SOURCE.with_name("kernel_facts.cpp"), tmp_path / "kernel_facts", BUILDS["thread"])
    assert run(program) == (0, "")


def test_everything_with_a_name_is_listed():
    calls = {"sync": 5, "any": 1, "wait<": 1, "copy": 2, "load_matrices<": 2, "await_previous": 5}
    for call, count in calls.items():
        found = sum(len(re.findall(rf"machine\.(?:template )?{call}\(?", text)) for text in PARTS.values())
        assert found == count, call
    assert len(set(BARRIERS)) == 6 and len(WAITS) == 1 and len(AWAITS) == 5
    assert set(COPIES) == set(LOADS) == {("product", "weights"), ("product", "rows")}
