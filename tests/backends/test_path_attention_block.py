"""The rows' path attention on the CPU: right, free of races, the same bits in any place and company.

Its source runs on a machine of fibers (tests/block_code/path_attention.cpp). The loop over tiles is
that of `dag_attention`, whose own test injects the faults of copies and layout.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from block_code.programs import DIFFERENT, RACE, ROOT, build_mutated, needs, programs_of, run
from shared import once

SOURCE = ROOT / "tests/block_code/path_attention.cpp"
HEADER = ROOT / "csrc/algorithms/path_attention.h"
END = ROOT / "csrc/algorithms/path_end.h"
TILES = ROOT / "csrc/algorithms/attention_tiles.h"

pytestmark = needs(SOURCE, HEADER)

TEXT, ENDS, LOOP = (file.read_text() if file.exists() else "" for file in (HEADER, END, TILES))
BARRIERS = re.findall(r'machine\.sync_warp\("([^"]+)"', ENDS)
AWAITS = re.findall(r'machine\.await_previous\("([^"]+)"\)', TEXT + ENDS)
WAITS = re.findall(r'machine\.template wait<[^>]+>\("([^"]+)"\)', LOOP + ENDS)
COPIES = re.findall(r' copy\(machine, "([^"]+)"', ENDS)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return programs_of(tmp_path_factory, SOURCE)


@pytest.mark.parametrize(("sanitizer", "rounds"), [("thread", 3), ("address", 5)])
def test_rows_are_right_and_keep_their_bits(programs, sanitizer, rounds):
    """Both types and head sizes, 1 … 70 heads a cache head, prefixes round a split's end, windows, values not finite.

    Rows are held against double precision. Then each runs again alone or beside others, at other slots, behind other
    padding, in another capacity, layout and batch, with none, some or all of its ancestors committed: what its outputs
    are rounded from may not change by a bit.
    """
    status, output = run(programs[sanitizer], rounds, 1, timeout=300)
    assert status == 0, output[-3000:]


def test_splits_are_whole_tiles_and_follow_from_the_position(programs):
    assert run(programs["address"], "--cuts")[0] == 0


def test_ancestors_are_listed_by_depth(programs):
    """Equal depths by number; words and bits beyond the nodes, and nodes beyond the cache, do not count."""
    assert run(programs["address"], "--lists")[0] == 0


def test_barriers_and_waits_are_listed():
    assert len(BARRIERS) == 6 and len(WAITS) == 4 and AWAITS == ["prefix", "end"] and len(set(COPIES)) == 2
    assert not re.search(r"machine\.(?:any|copy|template|sync)", TEXT)
    assert not re.search(r"machine\.(?:any|sync)\(", ENDS), "a warp without a row has left"


@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_dropped_barrier_is_caught(programs, barrier):
    assert run(programs["thread"], 3, 2, "--drop", barrier)[0] in (RACE, DIFFERENT)


@pytest.mark.parametrize("wait", WAITS)
def test_a_dropped_wait_is_caught(programs, wait):
    assert run(programs["address"], 2, 2, "--hurry", wait)[0] == DIFFERENT


@pytest.mark.parametrize("name", sorted(set(COPIES)))
def test_a_wrong_place_is_caught(programs, name):
    assert run(programs["address"], 2, 2, "--misplace-copy", name)[0] == DIFFERENT


@pytest.mark.parametrize("name", AWAITS)
def test_a_kernel_that_does_not_wait_for_the_launch_before_is_caught(programs, name):
    assert run(programs["address"], 2, 2, "--no-await", name)[0] == DIFFERENT


def tiles_at_kv_len(text: str) -> str:
    old = "whole(prefix / kTileColumns * kTileColumns)"
    return text.replace(old, old.replace("(", "(mutation() == NUMBER ? prefix : "))


def splits_by_rows(text: str) -> str:
    cuts, begin, kernels = text.partition("// A block takes the whole tiles of one split")
    factor = "(1 + (mutation() == NUMBER && s.rows > 1))"
    kernels = re.sub(r"path_split_begin\(([^()]*)\)", rf"(path_split_begin(\1) * {factor})", kernels)
    kernels = re.sub(r"path_split_of\(([^()]*)\)", rf"path_split_of((\1) / {factor})", kernels)
    return cuts + begin + kernels


def sums_of_lanes(text: str) -> str:
    """A row's four sums are added up between the launches, in another order than within one."""
    old = "      state.total[i] = totals(row)[lane % 4];\n"
    assert old in text
    total = " + ".join(f"totals(row)[{lane}]" for lane in range(4))
    changed = f"lane % 4 != 0 ? 0.0f : {total}"
    return text.replace(old, old.replace("= ", f"= mutation() == NUMBER ? ({changed}) : "))


def waits_behind_an_early_return(text: str) -> str:
    """Blocks of splits that a text does not reach end before the launch before them may have."""
    wait = 'machine.await_previous("prefix");'
    return text.replace(wait, f"if (mutation() != NUMBER || path_split_begin(split) < a.kv_len[0]) {wait}")


def leaves_out_a_split(text: str) -> str:
    count = "min_int(splits - begin, kLanes)"
    return text.replace(count, f"{count} - (mutation() == NUMBER && splits - begin > 1)")


def puts_all_splits_in_one_place(text: str) -> str:
    return text.replace("s.splits() + split)", "s.splits() + split * (mutation() != NUMBER))")


def takes_the_row_of_the_warp_beside(text: str) -> str:
    return text.replace("row = own / parts(s)", "row = max_int(own - (mutation() == NUMBER), 0) / parts(s)")


def reads_states_late(text: str) -> str:
    """What the prefix left is taken behind the end's own tiles, and not before them."""
    load = re.search(r"    if \(text\.first < begin && .*?\n    }\n", text, re.DOTALL).group()
    tiles = re.search(r"    Tiles::run\(machine, rows, .*?;\n", text).group()
    early, late = (f"if ((mutation() == NUMBER) == {when}) {{\n{load}}}\n" for when in ("false", "true"))
    return text.replace(load + tiles, early + tiles + late)


OF_THE_PREFIX = (tiles_at_kv_len, splits_by_rows, sums_of_lanes, waits_behind_an_early_return)
OF_THE_ENDS = (leaves_out_a_split, puts_all_splits_in_one_place, takes_the_row_of_the_warp_beside, reads_states_late)
MUTATIONS = OF_THE_PREFIX + OF_THE_ENDS
NOT_AWAITED = 7


@pytest.fixture(scope="module")
def mutated(tmp_path_factory):
    def make(folder: Path) -> None:
        texts = {HEADER: TEXT, END: ENDS}
        for number, mutation in enumerate(MUTATIONS, 1):
            file = HEADER if mutation in OF_THE_PREFIX else END
            changed = mutation(texts[file])
            assert changed != texts[file]
            texts[file] = changed.replace("NUMBER", str(number))
        build_mutated(SOURCE, folder, texts)

    return once(tmp_path_factory, "path_attention_mutated", make) / "mutated"


@pytest.mark.parametrize("mutation", (*OF_THE_PREFIX[:-1], *OF_THE_ENDS))
def test_what_depends_on_more_than_the_text_is_caught(mutated, mutation):
    status, output = run(mutated, 3, 1, mutation=MUTATIONS.index(mutation) + 1)
    assert status == DIFFERENT, output


def test_a_block_that_ends_without_waiting_is_caught(mutated):
    status, output = run(mutated, 3, 1, mutation=len(OF_THE_PREFIX))
    assert status == NOT_AWAITED, output


def test_the_unchanged_source_is_not(mutated):
    assert run(mutated, 3, 1)[0] == 0
