"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_file(file: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file, then rename it: ``file`` is whole or absent, whoever else writes it."""
    partial = file.with_name(f".partial-{os.getpid()}-{file.name}")
    write(partial)
    _flush(partial)
    partial.replace(file)
    _flush(file.parent)


def write_text(file: Path, text: str) -> None:
    """Write UTF-8 text as :func:`write_file` does; the folder is made if need be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_json(file: Path, value: Any, indent: int | None = 1) -> Path:
    """Write strict JSON with a final newline as :func:`write_text` does; the file.

    Raises:
        ValueError: the value holds a number that JSON has not (nan, infinity).
    """
    write_text(file, json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n")
    return file


@contextmanager
def write_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill, which is then renamed: ``folder``, which must not exist, is whole or absent."""
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    for file in partial.rglob("*"):
        _flush(file)
    partial.rename(folder)
    _flush(folder.parent)


def _flush(path: Path) -> None:
    """Have the system write a file or folder to the disk, where it can."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:  # a folder on Windows
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
