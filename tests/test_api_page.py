"""The reference pages that are built: every public name, command, class and field is there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import gsd_kernels
from gsd_kernels_serve import fields

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
