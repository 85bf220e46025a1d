"""docs/contributing.md is true: its source decodes exactly, its layers are those that ``make lint`` holds."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest
import sizes
import torch
from models import noised, prompts, tiny
from transformers import PreTrainedModel

import gsd_kernels as gsd
from gsd_kernels import GraphConfig
from gsd_kernels_hf.engine.session import Session
from gsd_kernels_hf.model.facts import Facts

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "bigram_source.py"
CONFIG = GraphConfig(depth=2, width=3, branch=2, max_rows=16, merge_context=0, history_depth=2, history_width=3)
LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 700, 80
MOST_STAYS = 60
MOST_PATCHES, MOST_PRIVATE_PATCHES = 140, 9
"""Names of the package that tests patch, and those with an underscore among them: lowered, never raised."""
GREEDY = {"max_new_tokens": 40, "eos_token_id": [5, 7], "pad_token_id": 0, "do_sample": False}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.3, "seed": 3}
ROOMS_OF_PYTHON = ("gsd_kernels", "python", "bench", "tests", "examples")
NO_OPENING = re.compile(r"(What|Whether|Which|Those|As)\b")
OPENINGS_LEFT = {
    "examples": 1,
    "python/gsd_kernels_sglang": 6,
}
"""Docstrings by room that begin so still, at most; a room without a row has none. A row is lowered, never raised."""


@pytest.mark.parametrize("beside", [(), ("model", "history")], ids="+".join)
def test_its_source_decodes_exactly(beside):
    source, target = runpy.run_path(str(EXAMPLE))["Bigram"], tiny()
    options = {"assistant_model": noised(target) if "model" in beside else None, "graph_config": CONFIG}
    inputs = prompts(2, 12)
    for decoding in (GREEDY, SAMPLED):
        plain = gsd.generate(target, **inputs, **decoding)
        if not decoding["do_sample"]:
            assert torch.equal(plain, target.generate(**inputs, **decoding))
        sources = (*beside, source())
        out = gsd.generate(target, **inputs, **decoding, **options, draft_sources=sources, return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain)
        assert sum(out.stats.accepted[2:]) > 0, "nothing was accepted, so nothing was tested"


def test_the_layers_are_those_of_the_import_contracts():
    tomllib = pytest.importorskip("tomllib")
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = next(c["layers"] for c in contracts["contracts"] if c.get("containers") == ["gsd_kernels_hf"])
    shown = re.search(r"```text\n(.*?)```", PAGE.partition("## Who imports whom")[2], re.DOTALL)[1].splitlines()
    assert [line.split("  ")[0].strip() for line in shown] == layers


def test_files_and_functions_are_short():
    files = [path for room in ("python", "gsd_kernels", "bench") for path in sorted((ROOT / room).rglob("*.py"))]
    assert len(files) > 200
    long = []
    for path in files:
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        if len(text.splitlines()) > LINES_OF_A_FILE:
            long.append(f"{name}: {len(text.splitlines())}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > LINES_OF_A_FUNCTION:
                    long.append(f"{name}: {node.name}: {lines}")
    assert not long


def test_a_docstring_says_first_what_the_thing_does():
    begun: dict[str, list[str]] = {}
    for place in ("bench", "docs", "examples", "gsd_kernels", "python"):
        for path in sorted((ROOT / place).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                if NO_OPENING.match(ast.get_docstring(node) or ""):
                    begun.setdefault(sizes.room_of(name), []).append(f"{name}:{node.body[0].lineno}")
    beyond = {room: lines for room, lines in begun.items() if len(lines) > OPENINGS_LEFT.get(room, 0)}
    assert not beyond, "begin with Return, Say, The, A, … where these begin with What, Whether, Which, Those or As"


@pytest.mark.slow
def test_every_room_keeps_its_budget():
    if not (ROOT / ".git").exists():
        pytest.skip("which files are the project's says git")
    found = sizes.rooms()
    assert found.keys() == sizes.BUDGET.keys(), "tests/sizes.py: a row for each room"
    too_large = {room: (size, sizes.BUDGET[room]) for room, size in found.items() if size > sizes.BUDGET[room]}
    assert not too_large, "kB and ceiling (tests/sizes.py): take as much from the room"


def test_ceilings_only_fall():
    assert sizes.risen(sizes.BUDGET, sizes.before()) == []
    assert sizes.budget_of((ROOT / "tests" / "sizes.py").read_text("utf-8")) == sizes.BUDGET


def file_of(frame):
    """The file of the bindings that a frame is in, or was called from; ``None``: none."""
    while frame is not None and "/gsd_kernels_hf/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return None if frame is None else frame.f_code.co_filename.partition("/gsd_kernels_hf/")[2]


def test_a_name_of_a_module_is_given_once():
    """A table that another one hides is no error of a linter, and 36 tests failed for it once."""
    for path in (path for room in ROOMS_OF_PYTHON for path in (ROOT / room).rglob("*.py")):
        given = []
        for node in ast.parse(path.read_text("utf-8")).body:
            given += [t.id for t in getattr(node, "targets", ()) if isinstance(t, ast.Name)]
        assert len(given) == len(set(given)), (path, [name for name in given if given.count(name) > 1])


def entries(call, counts):
    """Calls from one file of the bindings into another up to the first step: (file, frame) where ``counts(frame)``."""
    found = []

    def watch(frame, event, _):
        if event != "call" or "/gsd_kernels_hf/" not in frame.f_code.co_filename:
            return
        if frame.f_code is Session.propose.__code__:
            sys.setprofile(None)
        elif file_of(frame.f_back) != file_of(frame) and counts(frame):
            found.append((file_of(frame), frame))

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def holds(value, storage):
    if isinstance(value, dict):
        return any(holds(part, storage) for part in value.values())
    return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == storage


DOORS = {
    "generate": lambda model, draft: lambda **call: gsd.generate(model, assistant_model=draft, **call),
    "custom_generate": lambda target, draft: (
        lambda **call: target.generate(custom_generate=gsd.GraphDecoder(draft, graph_config=CONFIG), **call)
    ),
    "patch": lambda target, draft: gsd.patch(target, assistant_model=draft, graph_config=CONFIG) and target.generate,
}


@pytest.mark.parametrize("door", DOORS)
def test_nobody_asks_the_model_again(door):
    """From a door to the first step, of a model that was never seen and of one that was.

    A stay is a call from another file that hands on the prompt, a model or its facts. Where facts of a model, or costs
    of a pair, are made for the first time, that is one.
    """
    target, inputs = tiny(dtype=torch.float32), prompts(1, 9)
    storage = inputs["input_ids"].untyped_storage().data_ptr()
    call = DOORS[door](target, noised(target))

    def stays(frame):
        values, outside = frame.f_locals.values(), frame.f_back
        while outside is not None and file_of(outside) != "model/facts.py" and outside.f_code.co_name != "own_costs":
            outside = outside.f_back
        return outside is None and any(isinstance(v, PreTrainedModel | Facts) or holds(v, storage) for v in values)

    for _ in range(2):
        walked = entries(lambda: call(**inputs, **GREEDY), stays)
        ways = {f"{file_of(frame.f_back)} → {file} {frame.f_code.co_name}" for file, frame in walked}
        assert 20 < len(ways) <= MOST_STAYS, "\n".join(sorted(ways))


def patches_of(tree):
    """What a file of tests patches of the package's modules and classes, by its last name."""
    imported = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and "gsd_kernels" in str(n.module)]
    ours = {alias.asname or alias.name for node in imported for alias in node.names} | {"gsd", "gsd_kernels"}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not call.args:
            continue
        if call.func.attr in ("setattr", "setitem", "delattr", "object", "patch"):
            *place, name = [ast.unparse(argument).strip("'") for argument in call.args[:2]]
            if (place or [name])[0].partition(".")[0] in ours | {"gsd_kernels_hf", "gsd_kernels_cli"}:
                yield name.rpartition(".")[2]


def test_tests_patch_few_names_of_the_package():
    """They freeze how a thing is made; what a user sees of it can be tested as well."""
    files = [ast.parse(file.read_text("utf-8")) for file in (ROOT / "tests").rglob("*.py")]
    names = [name for tree in files for name in patches_of(tree)]
    assert 0 < len(names) <= MOST_PATCHES
    assert sum(name.startswith("_") and not name.startswith("__") for name in names) <= MOST_PRIVATE_PATCHES


def test_every_file_of_tests_has_a_name_of_its_own():
    """pytest imports them by it, and a whole run refuses the second one, which a run of its folder does not."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
