"""An op's arguments and results as one line, and what is checked by it; nothing here waits for a device."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..graph import num_words

WORD = re.compile(r"([\w.]*)(\??)(!?)(?::(\w+))?(?:\[(.*)\])?(?:=(\w+))?(\{?)")
NUMBERS = {"int": "int", "float": "float", "bool": "bool", "ints": "int[]"}
"""Types of arguments that are no tensors, as a schema has them."""
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
IDS = (torch.int32, torch.int64)
ANY = ("...",)
"""Sizes of a tensor of any shape."""


Described = tuple[torch.Size, torch.dtype, torch.device]


class Part(NamedTuple):
    """An argument, a tensor of a list, or a result, whose name is its dtype."""

    name: str
    optional: bool
    written: bool
    dtype: str
    sizes: tuple[str, ...] | None  # None: no tensor
    letters: str  # of numbers
    tensors: list[Part] | None  # of a list


class Line:
    """An op's arguments and results, or tensors that belong together, as one line says them.

        graph!{ token_ids[B,N] scores:float32[B,N] } slots?[B,R] x:float[...] level:int=v -> [B,R/32] float32[D+1]

    A letter is one size, or one number, wherever it stands; R/32: the words of a mask over R; D+1: one more; ``...``:
    any shape. ``?``: or ``None``; ``!``: written in place. A dtype is torch's, int32 where it says none, ``float`` (any
    of :data:`FLOATS`), ``ids`` (any of :data:`IDS`), ``any``, or the name of an argument before, which has the same.
    Braces: a list of tensors, with ``...`` at its end of any number. Numbers have a type of :data:`NUMBERS`, and
    letters, but for ``ints`` of any number. Behind the arrow: results. C++ reads the same line, but for dtypes, which
    its pointers have (csrc/torch_ops/arguments.h).
    """

    def __init__(self, text: str) -> None:
        given, _, made = text.partition("->")
        self.text, self.arguments, self.results = text, _parts(given), _parts(made)
        flat = [part for argument in self.arguments for part in argument.tensors or [argument]]
        self.tensors = [part for part in flat if part.sizes is not None]

    @property
    def schema(self) -> str:
        """The same as ``torch.library`` takes it."""
        marks = iter("abcdefghij")
        arguments = ", ".join(f"{_type(part, marks)} {part.name}" for part in self.arguments)
        results = ", ".join("Tensor" for _ in self.results)
        return f"({arguments}) -> {results if len(self.results) == 1 else f'({results})'}"

    def read(self, arguments: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Values of :attr:`tensors`, ``None`` where there is none, and what letters of numbers stand for."""
        tensors: list[Any] = []
        numbers: dict[str, Any] = {}
        for part, value in zip(self.arguments, arguments, strict=True):
            if part.tensors is not None:
                tensors += [given for _, given in zip_longest(part.tensors, value[: len(part.tensors)])]
            elif part.sizes is not None:
                tensors.append(value)
            else:
                numbers.update(zip(part.letters, value if part.dtype == "ints" else [value], strict=False))
        return tensors, numbers

    def check(self, *arguments: Any, device: torch.device | None = None) -> None:
        """Raise unless the arguments are as the line says.

        Args:
            arguments: all of them.
            device: of all tensors; that of the first where none is given.

        Raises:
            TypeError, ValueError: the first argument that is another, by its name.
        """
        tensors, numbers = self.read(arguments)
        described = [
            (v.shape, v.dtype, v.device) if isinstance(v, Tensor) else None if v is None else type(v).__name__
            for v in tensors
        ]
        check = _check.__wrapped__ if torch.compiler.is_compiling() else _check
        check(self, tuple(described), device, tuple(numbers.items()))

    def made(self, *arguments: Any) -> list[Tensor]:
        """Results without content."""
        tensors, sizes = self.read(arguments)
        (device,) = {tensor.device for tensor in tensors if tensor is not None}  # some without content: a mistake
        for part, tensor in zip(self.tensors, tensors, strict=True):
            if tensor is not None:
                sizes = dict(zip(part.sizes or (), tensor.shape, strict=False)) | sizes

        def new(part: Part) -> Tensor:
            shape = [_size(size, sizes) for size in part.sizes or ()]
            return torch.empty(shape, dtype=getattr(torch, part.name or part.dtype), device=device)

        return [new(part) for part in self.results]


def _parts(words: str) -> list[Part]:
    parts: list[Part] = []
    into = parts
    for word in words.split():
        if word == "}":
            into = parts
        if word in ("}", "..."):
            continue
        name, optional, written, dtype, sizes, letters, brace = WORD.fullmatch(word).groups()  # type: ignore[union-attr]
        shape = None if sizes is None else tuple(filter(None, sizes.split(",")))
        listed: list[Part] | None = [] if brace else None
        into.append(Part(name, bool(optional), bool(written), dtype or "int32", shape, letters or "", listed))
        into = into if listed is None else listed
    return parts


def _type(part: Part, marks: Iterator[str]) -> str:
    """The type of an argument in a schema; what is written in place has a mark of its own."""
    if part.tensors is None and part.sizes is None:
        return NUMBERS[part.dtype] + "?" * part.optional
    mark = f"({next(marks)}!)" if part.written else ""
    return "Tensor" + mark + "[]" * (part.tensors is not None) + "?" * part.optional


def _size(size: str, sizes: dict[str, Any]) -> Any:
    """Evaluate a size of a line, a number, R, R/32 or D+1; a letter that is not known stays."""
    if size.isdigit():
        return int(size)
    letter, rest = sizes.get(size[0], size), size[1:]
    if not rest or isinstance(letter, str):
        return letter
    return num_words(letter) if rest == "/32" else letter + int(rest)


@functools.lru_cache(maxsize=1024)  # dozens of these a step, most of which were seen before
def _check(
    line: Line,
    described: tuple[Described | str | None, ...],
    device: torch.device | None,
    known: tuple[tuple[str, Any], ...],
) -> None:
    """Raise by what is :func:`described <Line.check>` of every value: a tensor, or the name of another type."""
    dtypes, sizes = {"float": FLOATS, "ids": IDS}, dict(known)
    for part, value in zip(line.tensors, described, strict=True):
        if part.optional and value is None:
            continue
        if value is None or isinstance(value, str):
            raise TypeError(f"{part.name}: expected a tensor, got {value}")
        (shape, found, place), letters = value, part.sizes or ()
        if letters != ANY:
            for size, actual in zip(letters, shape, strict=False):
                if size.isalpha():
                    sizes.setdefault(size, actual)
            expected = [_size(size, sizes) for size in letters]
            if expected != [*shape]:
                raise ValueError(f"{part.name}: expected shape [{', '.join(map(str, expected))}], got {list(shape)}")
        dtypes["any"] = (found,)
        allowed = dtypes.get(part.dtype) or (getattr(torch, part.dtype),)
        if found not in allowed:
            names = " or ".join(map(str, allowed))
            raise TypeError(f"{part.name}: expected {names}, got {found}".replace("torch.", ""))
        dtypes[part.name], device = (found,), device or place
        if place != device:
            raise ValueError(f"{part.name}: expected device {device}, got {place}: move it with .to()")
