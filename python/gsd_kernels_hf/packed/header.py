"""The head of a GGUF file: its numbers and names, and where its tensors lie.

The ``gguf`` package reads it, but for arrays of strings, a vocabulary, which it would read entry by entry in seconds:
they are passed over. What it reads without looking is looked at here: numpy cuts a slice that goes beyond the file.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..extras import cure

if TYPE_CHECKING:
    from .reader import TensorEntry

ARCHITECTURE = "general.architecture"


@dataclass
class Header:
    """The head of a model's file, or of the files it is split into: all that comes before their tensors' bytes.

    Attributes:
        path: of the file, of several the first.
        fields: values by key: numbers, strings, lists of numbers, ranges: places of strings that were passed over.
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
        count = header.fields.get("split.count", 0)
        if type(count) is not int or count < 0:
            raise header.refusal("split.count", count, "a whole number")
        for number in range(count if count > 1 else 0):  # 0 where parts were merged
            part = header if number == 0 else _read(_part(path, number, count))
            for key, expected in (("split.no", number), ("split.count", count)):
                if (value := part.fields.get(key, 0)) != expected:
                    raise part.refusal(key, value, f"{expected}, in part {number + 1} of {count}; give the first")
            for name in header.tensors.keys() & part.tensors.keys() if number else ():
                raise part.refusal(name, list(part.tensors[name].shape), f"no such tensor: {path} has it as well")
            header.tensors |= part.tensors
        expected = header.fields.get("split.tensors.count", len(header.tensors))
        if count > 1 and expected != len(header.tensors):
            raise header.refusal("split.tensors.count", expected, f"{len(header.tensors)}, as many as its parts hold")
        return header

    @property
    def architecture(self) -> str:
        """The kind of model that the file holds.

        Raises:
            ValueError: it does not say.
        """
        name = self.fields.get(ARCHITECTURE)
        if not isinstance(name, str):
            raise self.refusal(ARCHITECTURE, name, "a name, such as 'llama'")
        return name

    def refusal(self, what: str, value: object, expected: str) -> ValueError:
        """The error for a field or tensor that cannot be served; ``None`` is one that is not there."""
        shown = f"an array of {len(value)} strings" if isinstance(value, range) else repr(value)
        shown = "missing" if value is None else shown if len(shown) <= 80 else f"{shown[:80]}…"
        return ValueError(f"path: {self.path}: {what} is {shown}; expected {expected}")


def require(path: Path, *packages: str) -> None:
    """Raise unless there is such a file, and the packages that read it.

    Raises:
        ValueError: there is none.
        ImportError: a package is missing; the message has pip's line.
    """
    if not path.is_file():
        raise ValueError(f"path: {path} is no file; expected one in the GGUF format")
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"reading {path.name} needs the package {package}: {cure('gguf')}")


def _part(path: Path, number: int, count: int) -> Path:
    """Path of another part of a split model, whose first part lies at ``path``."""
    first, other = (f"-{n + 1:05}-of-{count:05}.gguf" for n in (0, number))
    part = path.with_name(path.name.removesuffix(first) + other)
    if not path.name.endswith(first) or not part.is_file():
        raise ValueError(
            f"path: {path} is of a model in {count} parts (split.count is {count}), and part {number + 1} is not "
            f"beside it; expected the first, called NAME{first}, in one folder with all others"
        )
    return part


def _read(path: Path) -> Header:
    """The head of one file."""
    require(path, "gguf")
    from .reader import Reader

    try:
        reader = Reader(path)
    except Exception as error:  # of a library that reads numbers as they come
        raise ValueError(f"path: {path} is damaged, cut short or no GGUF file: {error}") from error
    return Header(path, reader.values(), reader.entries)
