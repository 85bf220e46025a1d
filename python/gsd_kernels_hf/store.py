"""Files of what was learned, on disk between processes.

One small JSON file for a pair: its costs, and what was learned of its sources under every kind of sampling. Files are
replaced whole, so a reader never sees half of one; of two processes that write at once the later one wins. A file that
is not what was written, by its digest, is ignored: what is read needs no look at its values.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .files import write_text
from .locks import forkable_lock

logger = logging.getLogger("gsd_kernels")

VERSION = 9
MAX_BYTES = 4 << 20  # of a file: of 24 sections some hundred thousand are written
MAX_SECTIONS = 24  # of a file; the oldest ones go
WRITE_INTERVAL_SECONDS = 5.0  # between two writes of a file, at least
_THREAD = "gsd-kernels-store"  # name of one that writes
_told: set[Path] = set()
"""Folders of which a line has said that nothing can be kept there."""


def cache_dir() -> Path:
    """``$GSD_KERNELS_CACHE``, else the user's cache folder of the platform (``~/.cache/gsd_kernels`` on Linux)."""
    given = os.environ.get("GSD_KERNELS_CACHE")
    if given:
        return Path(given).expanduser()
    import platformdirs  # the one place that needs it: a machine without it can name the folder

    return platformdirs.user_cache_path("gsd_kernels", appauthor=False)


class Document:
    """A JSON object on disk.

    Args:
        kind: what its file's name begins with.
        about: what it is of; kept in it, and its digest in the file's name.
    """

    def __init__(self, kind: str, about: Mapping[str, Any]) -> None:
        self.about = json.loads(json.dumps(about, sort_keys=True, default=str))
        digest = hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()[:20]
        self.path = cache_dir() / f"{kind}-{digest}.json"
        self.warned = False
        self.lock = forkable_lock()

    def read(self) -> dict[str, Any]:
        """Its sections; empty where there is no file, or none that can be used (one warning)."""
        try:
            if self.path.exists() and not self.path.is_file():  # a pipe would be waited for
                raise ValueError("not a file")
            with self.path.open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
            if len(raw) > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES} bytes")
            data = json.loads(raw.decode())
            # Another version's, or another pair's of the same digest: nothing is damaged.
            if data["version"] != VERSION or data["about"] != self.about:
                return {}
            if data["digest"] != _digest(data["sections"]):
                raise ValueError("it is not what was written")
            return data["sections"]
        except (FileNotFoundError, NotADirectoryError):
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
            newest = list({**kept, **sections}.items())[-MAX_SECTIONS:]
            try:
                plain = json.loads(_text(dict(newest)))  # arrays as lists
                content = {"version": VERSION, "about": self.about, "digest": _digest(plain), "sections": plain}
                write_text(self.path, json.dumps(content))
            except Exception as error:
                folder = self.path.parent
                if folder not in _told:
                    _told.add(folder)
                    cure = "GSD_KERNELS_CACHE names another folder"
                    logger.warning("what was learned cannot be kept in %s (%s); %s", folder, error, cure)


def _text(sections: Mapping[str, Any]) -> str:
    return json.dumps(sections, default=lambda array: array.tolist())


def _digest(sections: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(sections).encode()).hexdigest()[:20]


class Saver:
    """Writes what ``content`` gives, at most every few seconds, and what is left when the process ends.

    Of savers of the same part of a file the one that saved last is heard. One that waits outlives whatever it was made
    for.

    Args:
        document: where to.
        content: sections as they are now, which nothing changes later.
        part: of the document, where others keep other parts of it.
    """

    def __init__(self, document: Document, content: Callable[[], Mapping[str, Any]], part: str = "") -> None:
        self.document, self.content = document, content
        self.place = document.path, part
        self.written = -WRITE_INTERVAL_SECONDS  # on the clock of time.monotonic
        self.writing: threading.Thread | None = None

    @property
    def waiting(self) -> bool:
        """Return whether something is to be written yet."""
        return _waiting.get(self.place) is self

    def save(self) -> None:
        """Write in a thread of its own, unless that was done a moment ago; then at a later call or the process's end.

        No call waits for a disk, which may take tens of milliseconds to put a file in another's place. What others wait
        to write is written as well, where its time has come: nobody may save it any more.
        """
        _waiting[self.place] = self
        for saver in list(_waiting.values()):
            saver._write()

    def _write(self) -> None:
        writes = self.writing is not None and self.writing.is_alive()
        if writes or time.monotonic() - self.written < WRITE_INTERVAL_SECONDS:
            return
        writing = threading.Thread(target=self.document.write, args=(self._take(),), name=_THREAD)
        try:
            writing.start()
        except RuntimeError:  # the interpreter is ending, or has no more threads
            _waiting[self.place] = self
        else:
            self.writing = writing

    def flush(self) -> None:
        """Write what is waiting, behind what is being written."""
        if self.writing is not None:
            self.writing.join()
        if self.waiting:
            self.document.write(self._take())

    def _take(self) -> Mapping[str, Any]:
        self.written, last = time.monotonic(), _waiting.pop(self.place, None)
        if last not in (None, self):  # saved in another thread meanwhile
            _waiting.setdefault(self.place, last)
        return self.content()


_waiting: dict[tuple[Path, str], Saver] = {}
"""Savers that have something to write yet, by what they write."""


@atexit.register
def _flush_all() -> None:
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join()
    for saver in list(_waiting.values()):
        saver.flush()
