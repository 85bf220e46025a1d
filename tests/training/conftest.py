"""A pair and a text to train on."""

from __future__ import annotations

import pytest
from checkpoints import save_pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``target``, ``draft``, and ``text.txt`` of a few thousand tokens."""
    folder = tmp_path_factory.mktemp("training")
    save_pair(folder)
    foxes = ("quick", "brown", "lazy")
    lines = (f"{i} times {i % 7} is {i * (i % 7)}, said the {foxes[i % 3]} fox" for i in range(120))
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder
