"""Pages, their code blocks, examples, extras and workflows say what is there."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import gsd_kernels
from gsd_kernels_serve import fields

# README and the pages of docs/: their links lead somewhere, and the first page stays short.


ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_is_short_has_both_commands_and_a_link_to_every_page():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 90
    pages = [f"(docs/{page.name})" for page in (ROOT / "docs").glob("*.md")]
    assert all(said in readme for said in ("make demo", "make test", "TORCH_INDEX_URL", "TORCH_SPEC", *pages))


def test_every_public_name_command_class_and_field_is_in_a_page_that_is_built(tmp_path):
    runpy.run_path(str(ROOT / "docs" / "build.py"))["main"](tmp_path)
    pages = {page.stem: page.read_text(encoding="utf-8") for page in tmp_path.iterdir()}
    assert all(f"### `{name}`\n" in pages["api"] for name in gsd_kernels.__all__ if name != "__version__")
    assert "**Args**\n\n- `" in pages["api"] and ":func:" not in pages["api"]
    assert "## `gsd-kernels generate`" in pages["commands"] and "* `--seed" in pages["commands"]
    assert "| `LlamaForCausalLM` | served |" in pages["models"]
    assert fields.table() in pages["server"]


# GitHub's workflows are read, and a change's runs what a user would.


FOLDER = ROOT / ".github" / "workflows"


@pytest.mark.skipif(not FOLDER.exists(), reason="not a source checkout")
@pytest.mark.parametrize("name", ["tests", "wheels", "weekly"])
def test_a_workflow_is_read_and_of_a_change_runs_the_tests(name):
    workflow = yaml.safe_load((FOLDER / f"{name}.yml").read_text(encoding="utf-8"))
    assert workflow[True], "YAML reads `on` as a boolean"
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    if name == "tests":
        assert commands == ["bash .ci/run"]
        assert re.search(r"^make test$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)


# Extras that are named anywhere are in pyproject.toml, and ``make`` fails where pip does not find one.


if sys.version_info < (3, 11):
    tomllib = pytest.importorskip("tomli")
else:
    import tomllib
ROOMS = ("gsd_kernels", "python", "bench", "docs", "examples", "tests", ".ci")
NAMED = re.compile(
    r"""(?:gsd-kernels|["' ]\.)\[([a-z0-9,-]+)\]|\bextra (?:`+)?\[([a-z0-9,-]+)\]"""
    r"""|\bcure\(["']([a-z]+)["']"""
)


def test_every_extra_that_a_page_a_message_or_make_names_exists():
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    pages = [ROOT / "README.md", ROOT / "pyproject.toml"]
    pages += [path for room in ROOMS for kind in ("py", "md", "wheel") for path in (ROOT / room).rglob(f"*{kind}")]
    texts = {str(path): path.read_text(encoding="utf-8") for path in pages if path != Path(__file__)}
    if shutil.which("make"):
        goals = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1].split()
        texts["make"] = subprocess.check_output(["make", "-n", "--always-make", *goals], cwd=ROOT, text=True)
    named = {
        (extra, where)
        for where, text in texts.items()
        for match in NAMED.finditer(text)
        for extra in next(filter(None, match.groups())).split(",")
    }
    assert {extra for extra, _ in named} > {"gguf", "plot", "test", "ray", "oracles"}  # the pattern finds some
    assert not {(extra, where) for extra, where in named if extra not in known}


def test_import_is_light():
    """``import gsd_kernels`` loads neither transformers nor triton; the bindings come on first use."""
    code = (
        "import sys, gsd_kernels; heavy = {'transformers', 'triton'} & set(sys.modules); assert not heavy, heavy; "
        "assert 'generate' in dir(gsd_kernels)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
