"""Changes of csrc/algorithms that the problems must notice: one at a time is in force, or none."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Change(NamedTuple):
    header: str
    old: str
    new: str  # in the place of `old`; with CHANGED what both become, in which it says whether the change is in force
    problem: str
    rounds: int = 3


def added_late(multiply: str, more: str = "") -> str:
    """Products into sums that begin at 0, which are added by an instruction of their own."""
    add = "for (int j = 0; j < kRowTiles; j++) for (int i = 0; i < 4; i++) sums[j][i] += late[j][i];"
    return f"[&] {{ float late[kRowTiles][4] = {{}}; {multiply}; {more} {add} }}()"


ROWS, HEADS, GROUP = "rows_product", "rows_heads", "rows_group_product"
CHANGES = {
    "a layout with bank conflicts": Change(
        "attention_tiles", "chunk ^ (row & 7)", "(chunk ^ (CHANGED ? 0 : row & 7))", "path"
    ),
    "whole tiles up to the prefix' end": Change(
        "path_attention",
        "whole(prefix / kTileColumns * kTileColumns)",
        "whole(CHANGED ? prefix : prefix / kTileColumns * kTileColumns)",
        "path",
        6,
    ),
    "sums of lanes added between the launches": Change(
        "path_attention",
        "state.total[i] = totals(row)[lane % 4]",
        "state.total[i] = !CHANGED ? totals(row)[lane % 4] : lane % 4 != 0 ? 0.0f : "
        "totals(row)[0] + totals(row)[1] + totals(row)[2] + totals(row)[3]",
        "path",
        6,
    ),
    "blocks that end without waiting": Change(
        "path_attention",
        'machine.await_previous("prefix")',
        'if (!CHANGED || path_split_begin(split) < a.kv_len[0]) machine.await_previous("prefix")',
        "path",
        6,
    ),
    "a split of a path left out": Change(
        "path_end",
        "min_int(splits - begin, kLanes)",
        "(min_int(splits - begin, kLanes) - (CHANGED && splits - begin > 1))",
        "path",
        6,
    ),
    "all splits in one place": Change("path_end", "s.splits() + split)", "s.splits() + split * !CHANGED)", "path", 6),
    "the row of the warp beside": Change(
        "path_end", "row = own / parts(s)", "row = max_int(own - CHANGED, 0) / parts(s)", "path", 6
    ),
    "splits that depend on the row count": Change(
        "rows", "wanted * output_blocks(kWideOutputs)", "wanted * tile_rows() * output_blocks(kWideOutputs)", "many", 1
    ),
    "two steps of inputs swapped": Change(ROWS, "32 * step", "32 * (step ^ 1)", "product"),
    "a split that is not added": Change(ROWS, "s < splits", "s < splits - 1", "many", 1),
    "splits that are added backwards": Change(ROWS, "parts + s * kPart", "parts + (splits - s) * kPart", "many", 1),
    "a sine of the other sign": Change(HEADS, "-machine.times(y, angle[1])", "machine.times(y, angle[1])", "between"),
    "another pair": Change(HEADS, "output & (t.head_dim - 1)", "((output & (t.head_dim - 1)) ^ 1)", "turned", 4),
    "values among the keys": Change(HEADS, "(tile.matrix - 1) * t.kv_heads", "0 * t.kv_heads", "turned", 4),
    "squares of a part of the head": Change(HEADS, "w < kWarps", "w < kWarps - 1", "turned", 4),
    "a sum that is added behind its products": Change(
        ROWS,
        "machine.template multiply<Element>(sums, 0, left[0], right)",
        added_late("machine.template multiply<Element>(late, 0, left[0], right)"),
        "product",
    ),
    "a group's sum that is added behind its products": Change(
        GROUP,
        "machine.template multiply_group<Element>(sums, weights, rows)",
        added_late(
            "machine.template multiply_group<Element>(late, weights, rows)",
            'machine.multiply_commit(); machine.template multiply_wait<0>("late"); machine.multiply_begin();',
        ),
        "group",
        6,
    ),
    "two steps of a group's inputs swapped": Change(GROUP, "32 * step", "32 * (step ^ 1)", "group", 6),
    "a group's split that is not added": Change(GROUP, "s < cut.splits", "s < cut.splits - 1", "group", 6),
    "a group's splits added backwards": Change(GROUP, "sums_of(s)", "sums_of(cut.splits - 1 - s)", "group", 6),
    "a share that is not the split's": Change(GROUP, "split * cut.split_stages", "0 * cut.split_stages", "group", 6),
    "sums that no fence orders": Change(GROUP, "machine.multiply_begin()", "(void)0", "group", 6),
    "a split's sums in another's place": Change(GROUP, "sums_of(share.split)", "sums_of(0)", "group", 6),
    "ups that are taken for gates": Change(GROUP, "if (ups_first(a)", "if (!CHANGED && ups_first(a)", "group", 6),
    "a pair of another head": Change(GROUP, "pair & -(a.turn.head_dim / 2)", "0", "group turned", 6),
    "half of the arrivals": Change(
        GROUP,
        "kConsumers * kGroupThreads / kLanes",
        "kConsumers * kGroupThreads / kLanes / 2",
        "group",
        6,
    ),
}


MUTATION = """#pragma once
#include <cstdlib>
inline int mutation() {
  static const char* const given = std::getenv("GSD_MUTATION");
  static const int number = given == nullptr ? 0 : std::atoi(given);
  return number;
}
"""
"""Included before everything else: which of them is in force; 0 is none."""


def plant(headers: Path) -> None:
    """Write all of them into copies of the headers, and ``mutation.h`` beside them."""
    (headers / "mutation.h").write_text(MUTATION, encoding="utf-8")
    given = {name: (headers / f"{name}.h").read_text(encoding="utf-8") for name, *_ in CHANGES.values()}
    changed = dict(given)
    for number, change in enumerate(CHANGES.values(), 1):
        assert given[change.header].count(change.old) == 1, change
        both = change.new if "CHANGED" in change.new else f"(CHANGED ? {change.new} : {change.old})"
        both = both.replace("CHANGED", f"(mutation() == {number})")
        changed[change.header] = changed[change.header].replace(change.old, both)
    for name, text in changed.items():
        (headers / f"{name}.h").write_text(text, encoding="utf-8")
