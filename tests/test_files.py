"""A writer that is interrupted leaves what was there before."""

from __future__ import annotations

import pytest

from gsd_kernels_hf.files import write_file, write_folder, write_text


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


def test_a_folder_is_whole_or_absent(tmp_path):
    folder = tmp_path / "step-1"
    with pytest.raises(KeyboardInterrupt), write_folder(folder) as partial:
        interrupted(partial / "state")
    assert not folder.exists()
    with write_folder(folder) as partial:
        assert list(partial.iterdir()) == [], "what the interrupted one left is gone"
        (partial / "state").write_text("whole")
    assert (folder / "state").read_text() == "whole"
