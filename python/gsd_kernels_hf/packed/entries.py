"""Records of a GGUF file's head: a tensor, an array of strings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file.

    Attributes:
        shape: outputs first, as in PyTorch.
        kind: of its numbers, as gguf names it: ``q4_0``.
        path: of the file.
        offset, nbytes: where its bytes lie there.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Strings:
    """An array of strings, which were passed over."""

    count: int
