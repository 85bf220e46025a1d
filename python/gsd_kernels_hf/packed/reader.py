"""gguf's reader of a file's head: lazy where it is slow, and strict where it is not.

It passes over arrays of strings, a vocabulary, which gguf reads entry by entry in seconds. It refuses what the file
does not hold, where numpy would cut a slice short. Tensors lie one behind the other, as llama.cpp demands.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField

LENGTH = struct.Struct("<Q")  # of a string


class TensorEntry(NamedTuple):
    """A tensor of a file.

    Attributes:
        shape: outputs first, as in PyTorch.
        kind: of its numbers, as gguf names it: ``q4_0``.
        path: of the file.
        offset, nbytes: where its bytes lie there.
    """

    shape: tuple[int, ...]
    kind: str
    path: Path
    offset: int
    nbytes: int


class Reader(GGUFReader):  # type: ignore[misc]
    """The head of one file.

    Attributes:
        entries: its tensors by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(path)
        if self.byte_order != "I":
            raise ValueError("it is for big-endian machines")

    def values(self) -> dict[str, Any]:
        """Fields by key: numbers, strings, lists of numbers, ranges: places of strings that were passed over."""
        return {key: _value(field) for key, field in self.fields.items() if not key.startswith("GGUF.")}

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ValueError(f"it goes on to byte {end}, and the file ends at {len(self.data)}")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        of, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        kind, parts, at = GGUFValueType(int(of[0])), [of, length], orig_offs + 12
        if kind == GGUFValueType.STRING:
            data, length_at = memoryview(self.data), LENGTH.unpack_from  # by numpy a vocabulary takes half a second
            for _ in range(int(length[0])):
                at += LENGTH.size + length_at(data, at)[0]
            self._get(at, np.uint8, 0)
        else:
            parts.append(self._get(at, self.gguf_scalar_to_np[kind], int(length[0])))
            at += parts[-1].nbytes
        return at - orig_offs, parts, [], [GGUFValueType.ARRAY, kind]

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        self.entries: dict[str, TensorEntry] = {}
        end = 0
        for field in fields:
            _, _, _, dims, raw, (offset,) = field.parts
            shape, kind = tuple(reversed(dims.tolist())), GGMLQuantizationType(int(raw[0]))
            weights, size = GGML_QUANT_SIZES[kind]
            if not shape or min(shape) < 1 or shape[-1] % weights:
                raise ValueError(f"{field.name} is {list(shape)} of {kind.name}; expected rows of blocks of {weights}")
            nbytes, place = math.prod(shape) // weights * size, start_offs + end
            if offset != end or place + nbytes > len(self.data):
                raise ValueError(
                    f"{field.name} has {nbytes} bytes from {offset} on; expected them from {end} on, within the file"
                )
            self.entries[field.name] = TensorEntry(shape, kind.name.lower(), self.path, place, nbytes)
            end += -(-nbytes // self.alignment) * self.alignment
        if len(self.entries) < len(fields):
            raise ValueError("two tensors have one name")


def _value(field: ReaderField) -> Any:
    kind, *of = field.types
    if kind != GGUFValueType.ARRAY:
        return field.contents()
    return range(int(field.parts[-1][0])) if of == [GGUFValueType.STRING] else field.parts[-1].tolist()
