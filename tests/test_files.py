"""A writer that is interrupted leaves what was there before."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import save_file

from gsd_kernels_hf.files import decode_utf8, open_saved, read_utf8, write_file, write_folder, write_text


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


def test_a_file_is_for_those_that_any_new_file_is_for(tmp_path):
    (tmp_path / "any").touch()
    write_file(tmp_path / "one", lambda partial: save_file({"x": torch.zeros(1)}, partial))
    assert (tmp_path / "one").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_a_folder_is_whole_or_absent(tmp_path):
    folder = tmp_path / "step-1"
    with pytest.raises(KeyboardInterrupt), write_folder(folder) as partial:
        interrupted(partial / "state")
    assert list(tmp_path.iterdir()) == [], "nothing is left of what was interrupted"
    with pytest.raises(OSError, match="step-1"), write_folder(folder) as late:
        (late / "state").write_text("late")
        with write_folder(folder) as early:
            (early / "state").write_text("early")
    assert (folder / "state").read_text() == "early", "of two writers neither touches the other's"
    assert list(tmp_path.iterdir()) == [folder]


def test_what_a_killed_writer_left_goes_and_what_another_one_writes_stays(tmp_path):
    left, others = (tmp_path / f".partial-{'0' * 12}-{name}" for name in ("made", "made-2"))
    for each in (left, others):
        each.mkdir()
    with write_folder(tmp_path / "made") as late:
        with write_folder(tmp_path / "made") as early:
            assert {*tmp_path.iterdir()} == {late, early, others}
        shutil.rmtree(tmp_path / "made")


def test_a_file_that_is_read_is_named_with_its_option(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes("\ufeffö\r\n".encode())
    assert read_utf8(file, "text") == "ö\r\n"
    with pytest.raises(ValueError, match=r"^text: .* is a folder"):
        read_utf8(tmp_path, "text")
    with pytest.raises(ValueError, match=r"^text: .* lies in a file"):
        read_utf8(file / "inside", "text")
    with pytest.raises(FileNotFoundError, match=r"^text: no such file: "):
        read_utf8(tmp_path / "none", "text")
    with pytest.raises(ValueError, match=r"^text: x is not UTF-8 text \(byte 1: "):
        decode_utf8(b"a\xff", "text", "x")


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 100, b"def f(): pass\n" * 30, b'{"format": "ours"}' * 9])
def test_a_users_file_of_another_kind_is_left_to_the_user(content, tmp_path):
    file = tmp_path / "mine.py"
    file.write_bytes(content)
    with (
        pytest.raises(ValueError, match=r"^it: .*mine\.py is damaged or something else: it is not ours$"),
        open_saved(file, "it", "ours", 1, foreign="is not ours"),
    ):
        pass
    assert file.read_bytes() == content
