"""The head of a GGUF file: its numbers and names, and where its tensors lie.

The ``gguf`` package reads a vocabulary entry by entry, in seconds; here string arrays are passed over. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
VERSIONS = (2, 3)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of :mod:`struct` by type of value."""
STRING, ARRAY = 8, 9
ALIGNMENT = 32
TYPES = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    30: ("bf16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    20: ("iq4_nl", 32, 18),
    39: ("mxfp4", 32, 17),
}
"""Name, weights of a block and its bytes, by type of tensor."""


@dataclass(frozen=True)
class Stored:
    """A tensor of the file.

    Attributes:
        shape: outputs first, as in PyTorch.
        kind: of :data:`TYPES`, or the number of one that is not there.
        offset, nbytes: where its bytes lie in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    nbytes: int


@dataclass
class Header:
    """What a file says before its tensors' bytes.

    Attributes:
        fields: values by key; of an array of strings their number.
        tensors: by name.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Stored] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Header:
        """Read a file's head.

        Raises:
            ValueError: not a GGUF file, one of another version, damaged, or cut short.
        """
        if not path.is_file():
            raise ValueError(f"path: {path} is no file; expected one in the GGUF format")
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ValueError(f"path: {path} does not begin with GGUF, so it is not in that format")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                try:
                    header = _Reader(data).header()
                except (struct.error, UnicodeDecodeError, OverflowError, KeyError, MemoryError) as error:
                    raise ValueError(f"path: {path} is damaged or cut short in its head ({error})") from error
        for tensor in header.tensors.values():
            if tensor.offset + tensor.nbytes > size:
                raise ValueError(f"path: {path} is cut short: {tensor.name} ends behind its {size} bytes")
        return header


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, len(MAGIC)

    def header(self) -> Header:
        version, tensors, fields = self.numbers("IQQ")
        if version not in VERSIONS:
            raise KeyError(f"version {version}; 2 and 3 are read")
        header = Header()
        for _ in range(fields):
            key = self.string()
            header.fields[key] = self.value(self.number("I"))
        entries = [(self.string(), self.shape(), *self.numbers("IQ")) for _ in range(tensors)]
        alignment = max(1, int(header.fields.get("general.alignment", ALIGNMENT)))
        begin = -(-self.at // alignment) * alignment
        for name, shape, kind, offset in entries:
            label, weights, size = TYPES.get(kind, (f"type {kind}", 1, 0))
            count = 1
            for length in shape:
                count *= length
            header.tensors[name] = Stored(name, shape, label, begin + offset, count // weights * size)
        return header

    def numbers(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def number(self, form: str) -> Any:
        return self.numbers(form)[0]

    def shape(self) -> tuple[int, ...]:
        """Stored with the fastest dimension first."""
        return tuple(reversed(self.numbers(f"{self.number('I')}Q")))

    def string(self) -> str:
        length = self.number("Q")
        end = self.at + length
        if end > len(self.data):
            raise struct.error(f"a string of {length} bytes")
        text = self.data[self.at : end].decode()
        self.at = end
        return text

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.number(NUMBERS[kind])
        of, count = self.numbers("IQ")
        if of == STRING:
            self.skip_strings(count)
            return count
        return list(self.numbers(f"{count}{NUMBERS[of]}"))

    def skip_strings(self, count: int) -> None:
        at, data, length_at = self.at, self.data, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + length_at(data, at)[0]
        self.at = at
