"""docs/api.md is what the docstrings are, the table of docs/serving.md what the server's is."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import gsd_kernels

SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "write_api.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("write_api", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_up_to_date(script):
    assert script.main(["--check"]) == 0


@pytest.mark.parametrize("which", ["PAGE", "SERVING"])
def test_a_stale_page_fails_and_is_left_alone(which, script, tmp_path, monkeypatch, capsys):
    pages = {name: tmp_path / name for name in ("PAGE", "SERVING")}
    for name, page in pages.items():
        page.write_text(getattr(script, name).read_text(encoding="utf-8"), encoding="utf-8")
        monkeypatch.setattr(script, name, page)
    stale = pages[which].read_text(encoding="utf-8").replace("temperature", "heat")
    pages[which].write_text(stale, encoding="utf-8")
    assert script.main(["--check"]) == 1
    assert pages[which].read_text(encoding="utf-8") == stale and str(pages[which]) in capsys.readouterr().err
    assert script.main([]) == 0
    assert script.main(["--check"]) == 0


def test_every_public_name_has_a_section(script, monkeypatch):
    text = script.page()
    assert all(f"### `{name}`\n" in text for name in gsd_kernels.__all__ if name != "__version__")
    monkeypatch.setattr(gsd_kernels, "__all__", [*gsd_kernels.__all__, "novelty"])
    with pytest.raises(ValueError, match="differ: novelty"):
        script.page()


def test_docstrings_become_markdown(script):
    doc = "Do :func:`~a.b.name` with ``x``.\n\nArgs:\n    x: a long\n        line.\n\nRaises:\n    ValueError: bad."
    expected = "Do `name` with `x`.\n\n**Args**\n\n- `x`: a long\n  line.\n\n**Raises**\n\n- `ValueError`: bad.\n"
    assert script.prose(doc) == expected

    def function(a: int, *, b: str = "c", **rest: object) -> None: ...

    assert script.signature(function) == "(a: int, *, b: str = 'c', **rest: object)"
