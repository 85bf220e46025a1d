"""The head of a GGUF file: its numbers and names, and where its tensors lie.

The ``gguf`` package reads it, but for arrays of strings, a vocabulary, which it would read entry by entry in seconds:
they are passed over. What it reads without looking is looked at here: numpy cuts a slice that goes beyond the file.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..extras import cure
from .entries import Strings, TensorEntry

PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""Name of a part of a split model."""


@dataclass
class Header:
    """The head of a model's file, or of the files it is split into: all that comes before their tensors' bytes.

    Attributes:
        path: of the file, of several the first.
        fields: values by key: numbers, strings, lists of numbers, :class:`Strings`.
        tensors: by name.
    """

    path: Path
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Header:
        """Read the head of a file, and of the parts that follow a split model's first one.

        Raises:
            ValueError: not a GGUF file, one of another version, damaged, cut short, or a part without the others.
        """
        header = _read(path)
        count = header.number("split.count", 0, 0)
        if count <= 1:  # 0 where parts were merged
            return header
        for number in range(1, count):
            header.join(_read(_part(header, number, count)), number, count)
        expected = header.number("split.tensors.count", len(header.tensors), 0)
        if expected != len(header.tensors):
            raise header.refusal("split.tensors.count", expected, f"{len(header.tensors)}, as many as its parts hold")
        return header

    def join(self, part: Header, number: int, count: int) -> None:
        """Take the tensors of a part."""
        for key, expected in (("split.no", number), ("split.count", count)):
            if (value := part.number(key, 0, 0)) != expected:
                raise part.refusal(key, value, f"{expected}, in part {number + 1} of {count}")
        for name in self.tensors.keys() & part.tensors.keys():
            raise part.refusal(name, list(part.tensors[name].shape), f"no such tensor: {self.path} has it as well")
        self.tensors |= part.tensors

    def number(self, key: str, default: int, least: int) -> int:
        """A whole number of a field that any file may have."""
        value = self.fields.get(key, default)
        if type(value) is not int or value < least:
            raise self.refusal(key, value, f"a whole number of at least {least}")
        return value

    def refusal(self, what: str, value: object, expected: str) -> ValueError:
        """The error for a field or tensor that cannot be served."""
        return ValueError(f"path: {self.path}: {what} is {_shown(value)}; expected {expected}")

    def missing(self, what: str, expected: str) -> ValueError:
        """The error for a field or tensor that is not there."""
        return ValueError(f"path: {self.path}: {what} is missing; expected {expected}")


def _shown(value: object) -> str:
    """A value as an error shows it."""
    text = f"an array of {value.count} strings" if isinstance(value, Strings) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _part(header: Header, number: int, count: int) -> Path:
    """Path of another part of a split model, whose first part this is."""
    path, own = header.path, header.number("split.no", 0, 0)
    named = PART.fullmatch(path.name)
    if named is None or int(named[3]) != count or int(named[2]) != own + 1:
        raise ValueError(
            f"path: {path} is part {own + 1} of {count} of a split model (split.count is {count}), and its name does "
            f"not tell where the others lie; expected one like NAME-{own + 1:05}-of-{count:05}.gguf"
        )
    first = path.with_name(f"{named[1]}-{1:05}-of-{count:05}.gguf")
    if own != 0:
        raise ValueError(f"path: {path} is part {own + 1} of {count} (split.no is {own}); give the first, {first}")
    part = path.with_name(f"{named[1]}-{number + 1:05}-of-{count:05}.gguf")
    if not part.is_file():
        raise ValueError(
            f"path: {path} is part 1 of {count} (split.count is {count}), and part {number + 1} is not beside it: "
            f"{part.name}; put all parts in one folder"
        )
    return part


def _read(path: Path) -> Header:
    """The head of one file."""
    if not path.is_file():
        raise ValueError(f"path: {path} is no file; expected one in the GGUF format")
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"reading {path.name} needs the package gguf: {cure('gguf')}")
    from .reader import Reader

    try:
        reader = Reader(path)
    except Exception as error:  # of a library that reads numbers as they come
        raise ValueError(f"path: {path} is damaged, cut short or no GGUF file: {error}") from error
    return Header(path, reader.values(), {entry.name: entry for entry in reader.entries})
