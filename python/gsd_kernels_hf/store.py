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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

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
VERSION = 10
VERSIONS = gsd_kernels.__version__, torch.__version__, transformers.__version__
MAX_SECTIONS = 24  # of a document; the oldest ones go
WRITE_AFTER_SECONDS = 5.0  # what is saved meanwhile is written with it
_told: set[Path] = set()
"""Folders of which a line has said that nothing can be kept there."""


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


class Document:
    """Named sections of plain values in one such file, in the cache folder.

    Args:
        kind: what its file's name begins with.
        about: what it is of, beside :data:`VERSIONS`; kept in it, and its digest in the file's name.
    """

    def __init__(self, kind: str, about: Mapping[str, Any]) -> None:
        self.about = json.loads(json.dumps({**about, "versions": VERSIONS}, sort_keys=True, default=str))
        self.told = json.dumps(self.about, sort_keys=True)
        digest = hashlib.sha256(f"{VERSION} {self.told}".encode()).hexdigest()[:20]
        self.path = cache_dir() / f"{kind}-{digest}.safetensors"
        self.warned = False
        self.lock = forkable_lock()

    def read(self) -> dict[str, Any]:
        """Its sections; empty where there is no file, or none that can be used (one warning)."""
        try:
            _, kept = read_saved(self.path, "kept", FORMAT, VERSION, foreign="is nothing that was kept")
            return json.loads(kept["sections"]) if kept["about"] == self.told else {}  # another of the same digest
        except FileNotFoundError:
            return {}
        except Exception as error:
            self.ignore(error)
            return {}

    def ignore(self, error: Exception) -> None:
        """Say once that what was kept cannot be used."""
        if not self.warned:
            self.warned = True
            logger.warning("ignoring %s, which cannot be used: %s", self.path, error)

    def write(self, sections: Mapping[str, Any]) -> None:
        """Put these sections in place of the file's of the same names; a warning a folder where that fails."""
        with self.lock:
            kept = {name: value for name, value in self.read().items() if name not in sections}
            newest = dict(list({**kept, **sections}.items())[-MAX_SECTIONS:])
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                text = json.dumps(newest, default=lambda array: array.tolist())
                write_saved(self.path, FORMAT, VERSION, {}, about=self.told, sections=text)
            except Exception as error:
                folder = self.path.parent
                if folder not in _told:
                    _told.add(folder)
                    cure = "GSD_KERNELS_CACHE names another folder"
                    logger.warning("what was learned cannot be kept in %s (%s); %s", folder, error, cure)


_waiting: dict[tuple[Path, str], tuple[Document, Mapping[str, Any]]] = {}
"""What is to be written yet, by file and part."""
_writer = threading.Timer(0.0, lambda: None)


def write_later(document: Document, sections: Mapping[str, Any], part: str) -> None:
    """Have sections written in a few seconds by a thread, or when the process ends: no call waits for a disk.

    Args:
        document: where to.
        sections: as of :meth:`Document.write`.
        part: of the document; of the same part the last is written.
    """
    global _writer
    _waiting[document.path, part] = document, sections
    if not _writer.is_alive():
        _writer = threading.Timer(WRITE_AFTER_SECONDS, _write_waiting)
        _writer.daemon = True
        with suppress(RuntimeError):  # the interpreter is ending, or has no more threads
            _writer.start()


def _write_waiting() -> None:
    for place in list(_waiting):
        if (found := _waiting.pop(place, None)) is not None:
            document, sections = found
            document.write(sections)


@atexit.register
def _flush_all() -> None:
    _writer.cancel()
    if _writer.is_alive():  # it may write just now
        _writer.join()
    _write_waiting()
