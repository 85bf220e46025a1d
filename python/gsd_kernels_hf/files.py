"""Files: read with errors that name them, and written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
"""What a name on the hub looks like, ``owner/name``; the few without an owner are of no family that is served."""


GGUF = ".gguf"
"""How the name of a file with a packed model ends."""

LOCK_INTERVAL = 0.05
"""Seconds between two looks at a lock."""

CHECKPOINT = "the folder of a checkpoint, or a hub id"
"""What names a model, in the words of errors."""

CONFIGS = ("config.json", "adapter_config.json")
"""One of them makes a folder a model's: a checkpoint's, or an adapter's that names its base."""


def read_utf8(file: Path, what: str) -> str:
    """The text of a UTF-8 file.

    Args:
        file: of the user's.
        what: the option that names it, the first word of every error.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a folder, or not UTF-8.
        OSError: it cannot be read.
    """
    return decode_utf8(read_file(file, what), what, file)


def read_file(file: Path, what: str) -> bytes:
    """The bytes of a file; see :func:`read_utf8`."""
    try:
        return file.read_bytes()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{what}: no such file: {file}") from error
    except (IsADirectoryError, NotADirectoryError) as error:
        raise ValueError(f"{what}: {file} is a folder, or lies in a file; expected a file") from error
    except OSError as error:
        raise OSError(f"{what}: {file} cannot be read: {error.strerror or type(error).__name__}") from error


def decode_utf8(data: bytes, what: str, name: object) -> str:
    """Text from bytes, a byte-order mark at its beginning left out.

    Raises:
        ValueError: they are not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        cure = f"convert it, as by iconv -f LATIN1 -t UTF-8 {name}"
        raise ValueError(f"{what}: {name} is not UTF-8 text (byte {error.start}: {error.reason}); {cure}") from error


def path_of(where: str | os.PathLike[str]) -> Path:
    """A file or folder as the user named it, ``~`` expanded.

    Raises:
        TypeError: no path.
    """
    return Path(os.fspath(where)).expanduser()


def checkpoint_place(where: str | os.PathLike[str], what: str, *, expected: str = CHECKPOINT) -> str:
    """A checkpoint's folder, ``~`` expanded, or a name on the hub; what can be neither is refused before any download.

    Args:
        where: as the user gave it.
        what: the option, the first word of every error.
        expected: in its place, where a file was named.

    Raises:
        ValueError: no such folder, or a file.
    """
    name = os.fspath(where)
    path = Path(name).expanduser() if name else Path()
    if name and path.is_dir():
        return str(path)
    if not name.strip():
        raise ValueError(f"{what}: empty; expected a checkpoint folder or a hub id")
    if path.exists():
        raise ValueError(f"{what}: {name} is a file; expected {expected}")
    beside = "/" in name and path.parent.is_dir()  # models/mine where there is a folder models
    if isinstance(where, os.PathLike) or beside or name.startswith((".", "~")) or not HUB_ID.fullmatch(name):
        hub = "" if "/" in name else "; on the hub, models are named owner/name"
        raise ValueError(f"{what}: no such folder: {name}{hub}")
    return name


def model_place(where: str, what: str, *, gguf: bool = True) -> str:
    """Find a model like :func:`checkpoint_place`: a folder must hold one; with ``gguf`` a GGUF file's path will do too.

    Raises:
        ValueError: no such folder or file, or a folder without a checkpoint.
    """
    path = Path(where).expanduser()
    if gguf and path.suffix == GGUF and not path.is_dir():
        if not path.is_file():
            raise ValueError(f"{what}: no such file: {where}")
        return str(path)
    expected = "the folder of a checkpoint, a hub id, or FILE.gguf" if gguf else CHECKPOINT
    place = checkpoint_place(where, what, expected=expected)
    if Path(place).is_dir() and not any((Path(place) / name).is_file() for name in CONFIGS):
        raise ValueError(f"{what}: no {CONFIGS[0]} in {where}; expected {expected}")
    return place


def check_writable(what: str, place: Path) -> None:
    """Raise where a file or folder cannot be written, before the minutes of work that end in it: by a file beside it.

    Args:
        what: the option that names it, the first word of the error.
        place: to be written.

    Raises:
        OSError: the folder that it will lie in, or be made in, takes no file.
    """
    above = next(parent for parent in place.absolute().parents if parent.exists())
    try:
        with TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise OSError(f"{what}: {above} cannot be written to ({error.strerror}); name another place") from error


def write_file(file: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file, then rename it: ``file`` is whole or as it was, whoever else writes it."""
    partial = _partial(file)
    try:
        partial.touch()
        mode = partial.stat().st_mode
        write(partial)
        with suppress(PermissionError):  # of a mount without modes
            partial.chmod(mode)  # as every new file has: safetensors makes one that nobody else reads
        _flush(partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    _flush(file.parent)


def _partial(place: Path) -> Path:
    """A place beside a file or folder to write it in, of this call alone: others may write the same at once."""
    return place.with_name(f".partial-{uuid.uuid4().hex[:12]}-{place.name}")


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
def locked(place: Path, seconds: float = math.inf) -> Iterator[bool]:
    """Let one process at a time in: lock a folder itself, or a file, which is made.

    Without the lock it goes on, and says ``False``: where another process has it for longer than ``seconds``, or where
    files cannot be locked.
    """
    with ExitStack() as stack:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(place, os.O_RDONLY if place.is_dir() else os.O_WRONLY | os.O_CREAT)
            stack.callback(os.close, handle)
            import fcntl

            end = time.monotonic() + seconds
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(LOCK_INTERVAL)
        except (ImportError, OSError):
            yield False
        else:
            yield True


@contextmanager
def write_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill, which is then renamed: ``folder``, which must not exist, is whole or absent."""
    partial = _partial(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        with locked(folder.parent):  # so that nobody takes a new one, not held yet, for a killed writer's
            _remove_left(folder)
            partial.mkdir()
            stack.enter_context(locked(partial))
        try:
            yield partial
            for file in partial.rglob("*"):
                _flush(file)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    _flush(folder.parent)


def _remove_left(folder: Path) -> None:
    """Remove what writers of a folder left that were killed: nobody holds it any more."""
    for left in folder.parent.glob(".partial-*"):
        if left.is_dir() and left.name.split("-", 2)[2:] == [folder.name]:
            with locked(left, 0.0) as alone:
                if alone:
                    shutil.rmtree(left, ignore_errors=True)


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
