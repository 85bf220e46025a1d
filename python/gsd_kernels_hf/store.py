"""Files of what was learned, on disk between processes: safetensors with a format, a version and a checksum.

Files are replaced whole, so a reader never sees half of one; of two processes that write at once the later one wins.
One that is not what was written is refused, so what is read needs no look at its values. The history, what a model
learned and an online learner are tensors; what a pair of models costs and accepted is a small one without any, which
is forgotten where it cannot be used.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import re
import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

import gsd_kernels

from .files import read_file, write_file
from .locks import forkable_lock

logger = logging.getLogger("gsd_kernels")

FORMAT = "gsd_kernels kept"
VERSION = 11
VERSIONS = gsd_kernels.__version__, torch.__version__, transformers.__version__
MOST_FILES = 256  # of a kind; the oldest ones go
MOST_SHARED = 64  # in a process; what was learned of the others is on disk
WRITE_AFTER_SECONDS = 5.0  # what is saved meanwhile is written with it
L = TypeVar("L", bound="Learned")
_told: set[Path] = set()
"""Folders of which a line has said that nothing can be kept there, and files that cannot be used."""


def cache_dir() -> Path:
    """``$GSD_KERNELS_CACHE``, else the user's cache folder of the platform (``~/.cache/gsd_kernels`` on Linux)."""
    given = os.environ.get("GSD_KERNELS_CACHE")
    if given:
        return Path(given).expanduser()
    import platformdirs  # the one place that needs it: a machine without it can name the folder

    return platformdirs.user_cache_path("gsd_kernels", appauthor=False)


def write_saved(file: Path, form: str, version: int, tensors: Mapping[str, Tensor], **about: object) -> None:
    """Write tensors and what is said of them as one safetensors file, which is whole or not there; with their sum."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    told = {name: str(value) for name, value in {"format": form, "version": version, **about}.items()}
    told["sum"] = _sum(tensors, told)
    write_file(file, lambda partial: save_file(tensors, partial, metadata=told))


def read_saved(
    file: Path, what: str, form: str, version: int, *, foreign: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what :func:`write_saved` wrote, bit by bit: the tensors and what is said of them.

    Args:
        file: to be read.
        what: it holds, the first word of every error.
        form: its ``format``.
        version: the newest that can be read.
        foreign: what is said of a file of another format.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, foreign, or of a newer version.
    """
    if not file.exists():
        raise FileNotFoundError(f"{what}: no such file: {file}")
    content = read_file(file, what)  # at once: a mapped file that another process replaces meanwhile is two files
    try:
        tensors = load(content)
        about = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__", {})
    except (SafetensorError, KeyError) as error:  # no such dtype in torch
        raise ValueError(f"{what}: {file} is damaged or something else: it {foreign}") from error
    if about.get("format") != form:
        raise ValueError(f"{what}: {file} {foreign}")
    if (found := about.get("version", "")) != str(version) and re.fullmatch(r"[1-9]\d{0,8}", found):
        raise ValueError(f"{what}: {file} has version {found}, newer than {version}; update gsd_kernels")
    if about.pop("sum", "") != _sum(tensors, about):
        raise damaged(what, file, "its content is not what was written")
    return tensors, about


def _sum(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """A checksum of tensors and of what is said of them."""
    found = zlib.crc32(repr(sorted(about.items())).encode())
    for name, tensor in sorted(tensors.items()):
        found = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.flatten().view(torch.uint8).numpy(), found)
    return str(found)


def damaged(what: str, file: Path, why: str) -> ValueError:
    """The error of a file of our own that does not hold what it should; the user decides what becomes of it."""
    return ValueError(f"{what}: {file} is damaged ({why}); nothing was loaded, save it anew")


class Learned(Protocol):
    """Something that was learned, whose arrays are kept on disk."""

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that are kept, where they lie."""
        ...


class Document:
    """A dictionary of plain values and arrays in one such file, in the cache folder, beside others of its kind.

    Args:
        kind: what its file's name begins with.
        about: what it is of, beside :data:`VERSIONS`; kept in it, and its digest in the file's name.
    """

    def __init__(self, kind: str, about: Mapping[str, Any]) -> None:
        self.kind, self.told = kind, json.dumps({**about, "versions": VERSIONS}, sort_keys=True, default=str)
        digest = hashlib.sha256(f"{VERSION} {self.told}".encode()).hexdigest()[:20]
        self.path = cache_dir() / f"{kind}-{digest}.safetensors"

    def read(self, part: Learned | None = None) -> dict[str, Any]:
        """The values that were written; empty where there is no file, or none that can be used (one warning).

        Args:
            part: takes all arrays over, or none where one is missing or of another size.
        """
        try:
            _, kept = read_saved(self.path, "kept", FORMAT, VERSION, foreign="is nothing that was kept")
            values = json.loads(kept["values"])
            arrays = {} if part is None else part.arrays()
            for array, value in [(a, np.array(values[name], a.dtype).reshape(a.shape)) for name, a in arrays.items()]:
                array[...] = value
            return values
        except FileNotFoundError:
            return {}
        except Exception as error:
            _warn_once("ignoring %s, which cannot be used: %s", self.path, error)
            return {}

    def write(self, values: Mapping[str, Any]) -> None:
        """Put these values in place of the file's; a warning a folder where that fails. The oldest of its kind go."""
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(values, default=lambda array: array.tolist())
            write_saved(self.path, FORMAT, VERSION, {}, about=self.told, values=text)
        except Exception as error:
            _warn_once(
                "what was learned cannot be kept in %s (%s); GSD_KERNELS_CACHE names another folder", folder, error
            )
        with suppress(OSError):  # another process removes them, too
            for old in sorted(folder.glob(f"{self.kind}-*.safetensors"), key=os.path.getmtime)[:-MOST_FILES]:
                old.unlink()


def _warn_once(message: str, place: Path, error: Exception) -> None:
    if place not in _told:
        _told.add(place)
        logger.warning(message, place, error)


_shared: dict[Path, Any] = {}
"""What this process learns of documents, by file, in the order in which it was last asked for."""
_lock = forkable_lock()


def shared(document: Document, make: Callable[[], L]) -> L:
    """The one object that learns of a document in this process; it begins with what the file has."""
    with _lock:
        part: L | None = _shared.pop(document.path, None)
        if part is None:
            part = make()
            document.read(part)
        _shared[document.path] = part  # the newest is last
        while len(_shared) > MOST_SHARED:
            del _shared[next(iter(_shared))]
    return part


_waiting: dict[Path, tuple[Document, Mapping[str, Any]]] = {}
"""What is to be written yet, by file."""
_writer = threading.Timer(0.0, lambda: None)


def write_later(parts: Mapping[Document, Learned]) -> None:
    """Have what was learned of documents so far written in a few seconds by a thread, or when the process ends.

    No call waits for a disk, and of one document the last is written.
    """
    global _writer
    for document, part in parts.items():
        _waiting[document.path] = document, {name: array.copy() for name, array in part.arrays().items()}
    if not _writer.is_alive():
        _writer = threading.Timer(WRITE_AFTER_SECONDS, _write_waiting)
        _writer.daemon = True
        with suppress(RuntimeError):  # the interpreter is ending, or has no more threads
            _writer.start()


def _write_waiting() -> None:
    for place in list(_waiting):
        if (found := _waiting.pop(place, None)) is not None:
            document, values = found
            document.write(values)


@atexit.register
def _flush_all() -> None:
    _writer.cancel()
    if _writer.is_alive():  # it may write just now
        _writer.join()
    _write_waiting()
