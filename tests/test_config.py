"""Configurations, environment variables, files and bars of progress."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import gsd_kernels as gsd
from gsd_kernels import environment
from gsd_kernels_hf.files import write_file, write_text

# GraphConfig: presets.


def test_presets():
    with pytest.raises(TypeError, match="nonsense"):
        gsd.GraphConfig.preset("tree", nonsense=1)
    for depth, levels in ((0, 4), (3, 4), (64, 64)):  # a chain has rows for the history's levels, as far as a step may
        chain = gsd.GraphConfig.preset("chain", depth=depth, history_depth=levels)
        assert (chain.width, chain.branch, chain.merge_context) == (1, 1, -1)
        assert chain.max_rows == min(depth + levels + 1, 128) and chain.max_path == chain.max_rows - 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        chain.depth = 3
    assert chain.replace(max_rows=4).max_path == 3


# Environment variables: one table, one prefix.


ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("gsd_kernels", "python", "csrc", "bench", "setup.py", ".ci", "Makefile")


def test_the_page_shows_the_table():
    assert environment.table() in (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")


def test_the_sources_read_no_variable_that_the_table_lacks():
    pattern = r"\bGSD_[A-Z_]+\b"
    found: dict[str, Path] = {}
    for top in SOURCES:
        files = [ROOT / top] if (ROOT / top).is_file() else sorted((ROOT / top).rglob("*"))
        for file in files:
            if file.suffix in (".py", ".cpp", ".h", ".cu", "") and file.is_file() and "results" not in file.parts:
                # Macros of C++ are no variables: these stand in quotes, or as a program's environment.
                code = file.read_text(encoding="utf-8")
                quoted = re.findall(rf"[\"'`$]{{1,2}}({pattern})", code) + re.findall(rf"({pattern})=", code)
                found |= dict.fromkeys(quoted, file)
    known = {environment.PREFIX + variable.name for variable in environment.VARIABLES}
    beginnings = {environment.PREFIX, f"{environment.PREFIX}BUILD_"}  # of names that code completes
    assert len(found.keys() & known) > 8, "the sources are read"
    assert {name: file for name, file in found.items() if name not in known | beginnings} == {}


# A writer that is interrupted leaves what was there before.


def interrupted(partial):
    partial.write_text("half")
    raise KeyboardInterrupt


def test_a_file_is_whole_or_as_before(tmp_path):
    file = tmp_path / "made" / "result.json"
    write_text(file, "öne\n")
    assert file.read_text(encoding="utf-8") == "öne\n" and [path.name for path in file.parent.iterdir()] == [file.name]
    with pytest.raises(KeyboardInterrupt):
        write_file(file, interrupted)
    assert file.read_text(encoding="utf-8") == "öne\n"
    write_text(file, "two")
    assert file.read_text() == "two"
