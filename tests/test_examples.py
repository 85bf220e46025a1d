"""The examples run, with no arguments and on the user's own checkpoints."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from checkpoints import save_pair

OWN_TESTS = {
    "gsd_in_100_lines": "tests/test_hundred_lines.py",  # has no command line
    "ray_batch": "tests/machines",  # starts Ray
}
EXAMPLES = sorted(
    path for path in Path(__file__).parents[1].joinpath("examples").glob("*.py") if path.stem not in OWN_TESTS
)


@pytest.fixture(scope="module")
def own_pair(tmp_path_factory):
    target, draft = save_pair(tmp_path_factory.mktemp("pair"))
    return ["--model", target, "--draft", draft, "--max-new-tokens", "8"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("whose", ["embedded", "own"])
def test_example(example, whose, own_pair, monkeypatch, tmp_path, capsys):
    if example.stem == "retrieval":
        pytest.importorskip("bm25s", reason="needs the extra [retrieval]")
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    arguments = own_pair if whose == "own" else []
    monkeypatch.setattr(sys, "argv", [str(example), *arguments])
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.strip()
    if example.stem == "batch":
        assert "the same tokens without a draft: True" in printed
    if example.stem == "retrieval":
        assert "the same tokens: True" in printed
    if example.stem == "chat":
        assert printed.count("tokens per step]") == 2


NEEDS = {"retrieval": ("bm25s", "[retrieval]"), "ray_batch": ("ray", "[ray]")}
COMMAND_LINES = sorted(
    path for path in Path(__file__).parents[1].joinpath("examples").glob("*.py") if path.stem != "gsd_in_100_lines"
)


@pytest.mark.parametrize("example", COMMAND_LINES, ids=lambda path: path.stem)
@pytest.mark.parametrize("missing", ["gsd_kernels_cli", "its own"])
def test_a_missing_package_is_named_with_the_line_of_pip(example, missing, monkeypatch, capsys):
    name, extra = NEEDS.get(example.stem, ("transformers", "pip install ."))
    if missing == "gsd_kernels_cli":
        if example.stem == "retrieval":
            pytest.importorskip("bm25s", reason="needs the extra [retrieval]")
        name, extra = "gsd_kernels_cli", "pip install"
    for module in [name, *(m for m in sys.modules if m.startswith(f"{name}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", [str(example)])
    with pytest.raises(SystemExit) as leave:
        runpy.run_path(str(example), run_name="__main__")
    assert str(leave.value).startswith(name) and "is missing" in str(leave.value) and extra in str(leave.value)
