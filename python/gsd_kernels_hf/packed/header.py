"""The head of a GGUF file: its numbers and names, and where its tensors lie.

The ``gguf`` package reads a vocabulary entry by entry, in seconds; here string arrays are passed over. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every size that a head states is compared with the file's
before anything is made of it, and tensors lie one behind the other as llama.cpp demands.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

MAGIC = b"GGUF"
VERSIONS = (2, 3)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""Formats of :mod:`struct` by type of value."""
BOOL, STRING, ARRAY = 7, 8, 9
SMALLEST = {**{kind: struct.calcsize(form) for kind, form in NUMBERS.items()}, STRING: 8}
"""Bytes of an array's entry, at least."""
ALIGNMENT_BYTES = 32
MAX_ENTRIES = 1 << 21  # of an array: vocabularies and their merges have some hundred thousand
MAX_TEXT_BYTES = 1 << 24  # bytes: chat templates have some thousand
MAX_NAME_BYTES = (1 << 16) - 1  # bytes, as the format says
MAX_TABLE = 1 << 16  # fields, and tensors of a part
MAX_DIMENSIONS = 4
TYPES = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    9: ("q8_1", 32, 40),
    10: ("q2_k", 256, 84),
    11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    15: ("q8_k", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
    41: ("q1_0", 128, 18),
}
"""Name, weights of a block and its bytes, by type of tensor."""
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""Name of a part of a split model."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file.

    Attributes:
        shape: outputs first, as in PyTorch.
        kind: of :data:`TYPES`.
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
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"path: {path} does not begin with GGUF, so it is not in that format")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.size = path, data, len(MAGIC), len(data)
        self.reading = "the head"  # what an error names

    def header(self) -> Header:
        self.reading = "the version"
        (version,) = self.numbers("I")
        if version not in VERSIONS:
            swapped = " (a file for big-endian machines)" if version in (v << 24 for v in VERSIONS) else ""
            self.fail(f"is {version}{swapped}; versions {' and '.join(map(str, VERSIONS))} are read")
        self.reading = "the number of tensors and fields"
        tensors, fields = self.numbers("QQ")
        self.within("the number of tensors", tensors, 24, MAX_TABLE)
        self.within("the number of fields", fields, 13, MAX_TABLE)
        header = Header(self.path)
        for number in range(fields):
            self.reading = f"the name of field {number} of {fields}"
            key = self.string(MAX_NAME_BYTES)
            if not key or key in header.fields:
                self.fail(f"is {key!r}; expected one that no other field has")
            self.reading = key
            header.fields[key] = self.value(self.numbers("I")[0])
        self.table(header, tensors)
        return header

    def table(self, header: Header, count: int) -> None:
        """The tensors: their bytes lie in the table's order, each aligned, nothing between them."""
        alignment = header.number("general.alignment", ALIGNMENT_BYTES, 0)
        if alignment & (alignment - 1) or not 8 <= alignment <= 1 << 30:
            raise header.refusal("general.alignment", alignment, "a power of two of at least 8")
        end, entries = 0, []
        for number in range(count):
            self.reading = f"the name of tensor {number} of {count}"
            name = self.string(MAX_NAME_BYTES)
            if not name or name in header.tensors:
                self.fail(f"is {name!r}; expected one that no other tensor has")
            self.reading = name
            shape, label, nbytes = self.tensor()
            (offset,) = self.numbers("Q")
            if offset != end:
                self.fail(f"has offset {offset}; expected {end}, where the tensor before it ends")
            entries.append(TensorEntry(name, shape, label, self.path, offset, nbytes))
            header.tensors[name] = entries[-1]
            end += -(-nbytes // alignment) * alignment
        begin = -(-self.at // alignment) * alignment
        for entry in entries:
            place = begin + entry.offset
            if place + entry.nbytes > self.size:
                raise ValueError(
                    f"path: {self.path} is cut short: {entry.name} has {entry.nbytes} bytes from {place} on, and the "
                    f"file ends at {self.size}"
                )
            moved = TensorEntry(entry.name, entry.shape, entry.kind, entry.path, place, entry.nbytes)
            header.tensors[entry.name] = moved

    def tensor(self) -> tuple[tuple[int, ...], str, int]:
        """Shape, kind and bytes of a tensor."""
        (dimensions,) = self.numbers("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self.fail(f"has {dimensions} dimensions; expected 1 to {MAX_DIMENSIONS}")
        stored = self.numbers(f"{dimensions}Q")  # the fastest dimension first
        (kind,) = self.numbers("I")
        if kind not in TYPES:
            self.fail(f"is of type {kind}; expected one of {', '.join(f'{n} ({t[0]})' for n, t in TYPES.items())}")
        label, weights, size = TYPES[kind]
        if min(stored) < 1 or stored[0] % weights:
            self.fail(f"is {list(reversed(stored))} of {label}; expected rows of whole blocks of {weights}")
        nbytes = math.prod(stored) // weights * size
        if nbytes > self.size:
            self.fail(f"is {list(reversed(stored))} of {label}, {nbytes} bytes; the file has {self.size}")
        return tuple(reversed(stored)), label, nbytes

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string(MAX_TEXT_BYTES)
        if kind in NUMBERS:
            return self.whole(kind, self.numbers(NUMBERS[kind]))[0]
        if kind != ARRAY:
            self.fail(f"has type {kind}; expected 0 to 12")
        of, count = self.numbers("IQ")
        if of not in SMALLEST:
            self.fail(f"is an array of type {of}; expected one of numbers or strings")
        self.within(f"the number of entries of {self.reading}", count, SMALLEST[of], MAX_ENTRIES)
        if of == STRING:
            return self.skip_strings(count)
        return list(self.whole(of, self.numbers(f"{count}{NUMBERS[of]}")))

    def whole(self, kind: int, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Booleans as such."""
        if kind != BOOL:
            return values
        for value in values:
            if value > 1:
                self.fail(f"is {value}; expected a boolean, 0 or 1")
        return tuple(map(bool, values))

    def numbers(self, form: str) -> tuple[Any, ...]:
        end = self.at + struct.calcsize(f"<{form}")
        if end > self.size:
            self.cut(end)
        values = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at = end
        return values

    def string(self, most: int) -> str:
        (length,) = self.numbers("Q")
        if length > most:
            self.fail(f"has {length} bytes; expected at most {most}")
        end = self.at + length
        if end > self.size:
            self.cut(end)
        raw = self.data[self.at : end]
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"path: {self.path}: {self.reading} is {_shown(raw)}; expected UTF-8") from error
        self.at = end
        return text

    def skip_strings(self, count: int) -> Strings:
        at, data, last, length_at = self.at, self.data, self.size - 8, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > last:
                self.cut(at + 8)
            at += 8 + length_at(data, at)[0]
        if at > self.size:
            self.cut(at)
        self.at = at
        return Strings(count)

    def within(self, what: str, count: int, each: int, most: int) -> None:
        """Refuse a number of things that the rest of the file cannot hold."""
        if count * each > self.size - self.at or count > most:
            raise ValueError(
                f"path: {self.path}: {what} is {count}; expected at most {min(most, (self.size - self.at) // each)}, "
                f"since the file has {self.size} bytes"
            )

    def cut(self, end: int) -> NoReturn:
        raise ValueError(
            f"path: {self.path} is damaged or cut short: {self.reading} ends at byte {end}, and the file at {self.size}"
        )

    def fail(self, why: str) -> NoReturn:
        raise ValueError(f"path: {self.path}: {self.reading} {why}")
