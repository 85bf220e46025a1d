"""Pages, their code blocks, examples, extras and workflows say what is there."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

import gsd_kernels
from gsd_kernels_cli import demo
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


def test_every_page_is_linked_from_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"(docs/{page.name})" in readme for page in (ROOT / "docs").glob("*.md"))


def test_the_readme_is_short_and_has_both_commands():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 90
    assert all(command in readme for command in ("make demo", "make test", "TORCH_INDEX_URL", "TORCH_SPEC", "PYTHON"))


# The reference pages that are built: every public name, command, class and field is there.


SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "build.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("build_pages", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_built(script, tmp_path):
    script.main(["--out", str(tmp_path)])
    pages = {page.stem: page.read_text(encoding="utf-8") for page in tmp_path.iterdir()}
    assert set(pages) == set(script.PAGES)
    assert "## `gsd-kernels generate`" in pages["commands"] and "* `--seed" in pages["commands"]
    assert "| `LlamaForCausalLM` | served |" in pages["models"]
    assert fields.table() in pages["server"]


def test_every_public_name_has_a_section(script, monkeypatch):
    text = script.api()
    assert all(f"### `{name}`\n" in text for name in gsd_kernels.__all__ if name != "__version__")
    monkeypatch.setattr(gsd_kernels, "__all__", [*gsd_kernels.__all__, "novelty"])
    with pytest.raises(ValueError, match="differ: novelty"):
        script.api()


def test_docstrings_become_markdown(script):
    doc = "Do :func:`~a.b.name` with ``x``.\n\nArgs:\n    x: a long\n        line.\n\nRaises:\n    ValueError: bad."
    expected = "Do `name` with `x`.\n\n**Args**\n\n- `x`: a long\n  line.\n\n**Raises**\n\n- `ValueError`: bad.\n"
    assert script.prose(doc) == expected

    def function(a: int, *, b: str = "c", **rest: object) -> None: ...

    assert script.signature(function) == "(a: int, *, b: str = 'c', **rest: object)"


# GitHub's workflows: they are read, and what they run is there and does what its step says.


FOLDER = ROOT / ".github" / "workflows"

of_workflows = pytest.mark.skipif(not FOLDER.exists(), reason="not a source checkout")


def steps(name: str) -> list[dict[str, Any]]:
    workflow = yaml.safe_load((FOLDER / f"{name}.yml").read_text(encoding="utf-8"))
    assert workflow[True], "YAML reads `on` as a boolean"
    (job,) = workflow["jobs"].values()
    assert job["timeout-minutes"] <= 90 and job["runs-on"]
    return job["steps"]


def runs(name: str) -> list[str]:
    return [step["run"] for step in steps(name) if "run" in step]


@of_workflows
@pytest.mark.parametrize("name", ["tests", "wheels", "weekly"])
def test_every_command_is_a_shell_script_whose_files_are_there(name):
    for command in runs(name):
        subprocess.run(["bash", "-n"], input=command, text=True, check=True)
        for script in re.findall(r"\.ci/\w+", command):
            subprocess.run(["bash", "-n", ROOT / script], check=True)


@of_workflows
def test_the_tests_are_those_of_the_readme():
    assert runs("tests") == ["bash .ci/run"]
    assert re.search(r"^make test$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)


@of_workflows
@pytest.mark.parametrize("mebibytes", [25, 26])
def test_a_wheel_that_is_too_large_fails(mebibytes, tmp_path):
    (gate,) = (command for command in runs("wheels") if "-size" in command)
    (tmp_path / "dist").mkdir()
    with open(tmp_path / "dist" / "gsd_kernels-0-cp310-abi3-manylinux_2_28_x86_64.whl", "wb") as file:
        file.truncate(mebibytes << 20)
    assert (subprocess.run(["bash", "-c", gate], cwd=tmp_path).returncode == 0) == (mebibytes == 25)


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


# examples/retrieval.py: whatever the cache guesses, the tokens are those of retrieving every time.


pytest.importorskip("bm25s", reason="needs the extra [retrieval]")

EXAMPLE = Path(__file__).parents[1] / "examples" / "retrieval.py"
SAMPLED = {"do_sample": True, "temperature": 0.8, "seed": 11}
LATENCY, LENGTH, INTERVAL = 0.25, 48, 4


@pytest.fixture(scope="module")
def example():
    module = types.ModuleType("retrieval")
    with pytest.MonkeyPatch.context() as patch:  # dataclasses look their module up
        patch.setitem(sys.modules, "retrieval", module)
        vars(module).update(runpy.run_path(str(EXAMPLE), run_name="retrieval"))
    return module


@pytest.fixture(scope="module")
def passages(example):
    return example.python_passages()


@pytest.fixture(scope="module")
def store(example, passages, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    example.Retriever.build(folder, passages)
    return folder


@pytest.fixture(scope="module")
def make(example, passages):
    """Generation from a prompt, by a patched model of the demo pair."""
    target, draft, tokenizer = demo.load()
    gsd_kernels.patch(target, assistant_model=draft, graph_config="tree")
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"][:48] for text in passages]

    def generation(prompt: str, arguments: dict, length: int = LENGTH):
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return example.Generation(target, tokenizer, ids, prompt_ids, length, INTERVAL, 6, arguments)

    return generation


@pytest.fixture
def slept(example, monkeypatch):
    """The latencies that were waited for."""
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    return waits


@pytest.mark.parametrize("arguments", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompt", ["def heappush(heap, item):\n", "class Queue:\n    def put(self, item):\n"])
def test_the_cache_changes_no_token_and_saves_waits(prompt, arguments, example, store, passages, make, slept):
    every, speculative = (example.Retriever(store, passages, LATENCY) for _ in range(2))
    expected = example.retrieving_every_time(make(prompt, arguments), every)
    assert len(expected) == LENGTH and every.waits == LENGTH // INTERVAL
    assert len({every.search([make(prompt, arguments).query(expected[:n])])[0][0] for n in range(0, LENGTH, 4)}) > 1
    cache = example.Cache(store, passages)
    slept.clear()
    tokens, guesses = example.retrieving_speculatively(make(prompt, arguments), speculative, cache, stride=3)
    assert tokens == expected
    assert speculative.waits < LENGTH // INTERVAL * 2 // 3
    assert slept == [LATENCY] * speculative.waits
    assert guesses.right > 0
