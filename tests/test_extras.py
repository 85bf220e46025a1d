"""Extras that are named anywhere are in pyproject.toml, and ``make`` fails where pip does not find one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    tomllib = pytest.importorskip("tomli")
else:
    import tomllib

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("gsd_kernels", "python", "bench", "docs", "examples", "tests", ".ci")
NAMED = re.compile(
    r"""(?:gsd-kernels|["' ]\.)\[([a-z0-9,-]+)\]|\bextra (?:`+)?\[([a-z0-9,-]+)\]"""
    r"""|\bcure\(["']([a-z]+)["']"""
)

needs_make = pytest.mark.skipif(
    shutil.which("make") is None or not (ROOT / "Makefile").exists(), reason="no make, or not a source checkout"
)


def extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"])


def named(text: str) -> set[str]:
    return {extra for match in NAMED.finditer(text) for extra in next(filter(None, match.groups())).split(",")}


def test_every_extra_that_a_page_or_a_message_names_exists():
    pages = [path for path in (ROOT / "README.md", ROOT / "pyproject.toml") if path.exists()]
    pages += [path for room in ROOMS for kind in ("py", "md", "wheel") for path in (ROOT / room).rglob(f"*{kind}")]
    found = {path: named(path.read_text(encoding="utf-8")) for path in pages if path != Path(__file__)}
    assert {extra for of_page in found.values() for extra in of_page} > {"gguf", "plot"}  # the pattern finds some
    unknown = {str(path): of_page - extras() for path, of_page in found.items() if of_page - extras()}
    assert not unknown


@needs_make
def test_every_extra_that_make_installs_exists():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    goals = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split()
    printed = subprocess.run(
        ["make", "--dry-run", "--always-make", *goals], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert {"plot", "gguf", "test", "ray", "oracles"} <= named(printed) <= extras()


@pytest.mark.slow
def test_import_is_light():
    """``import gsd_kernels`` loads neither transformers nor triton; the bindings come on first use."""
    code = (
        "import sys, gsd_kernels; heavy = {'transformers', 'triton'} & set(sys.modules); assert not heavy, heavy; "
        "assert 'generate' in dir(gsd_kernels); gsd_kernels.generate; assert 'transformers' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
