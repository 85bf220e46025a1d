"""Files and folders that are written whole or not at all, and what is saved in one file with its version."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open


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


@contextmanager
def open_saved(file: Path, what: str, form: str, version: int, *, foreign: str) -> Iterator[tuple[Any, dict[str, str]]]:
    """Open a safetensors file whose metadata tell its ``format`` and ``version``: the file and its metadata.

    Args:
        file: to be read.
        what: it holds, the first word of every error.
        form: its ``format``.
        version: the newest that can be read.
        foreign: what is said of a file of another format.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged (also where the block finds that by a ``KeyError``), foreign, or of a newer version.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{what}: no such file: {file}")
    try:
        with safe_open(file, framework="pt") as opened:
            about = opened.metadata() or {}
            if about.get("format") != form:
                raise ValueError(f"{what}: {file} {foreign}")
            if (found := number_in(about, "version")) > version:
                raise ValueError(f"{what}: {file} has version {found}, newer than {version}; update gsd_kernels")
            yield opened, about
    except (SafetensorError, KeyError, OSError) as error:
        raise ValueError(f"{what}: {file} is damaged ({type(error).__name__}); delete it") from error


def number_in(about: dict[str, str], name: str) -> int:
    """A number of a file's metadata.

    Raises:
        KeyError: it is not there, or no number.
    """
    if not about[name].isdecimal():
        raise KeyError(about[name])
    return int(about[name])


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
