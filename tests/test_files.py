"""A writer that is interrupted leaves what was there before."""

from __future__ import annotations

import pytest

from gsd_kernels_hf.files import decode_utf8, read_utf8, write_file, write_text


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
