"""Tokens of two tokenizers that mean the same bytes, and bytes as tokens behind other text."""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .modes import named
from .properties import vocabulary

SPACE = "▁"  # in the pieces of SentencePiece
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte among them
NO_TEXT = 256  # in the place of a byte
ROLES = ("eos", "bos", "pad", "unk")


LETTERS = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""The letter that stands for each byte in byte-level vocabularies, as GPT-2 has them: 256 printable ones."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a tokenizer as what they stand for.

    Attributes:
        spelled: bytes of every ordinary token, by id.
        marks: ids of tokens that stand for no text of their own, and of added ones, by their content.
        roles: ids of the tokens that begin a text, end it, pad it, and stand for what is unknown, as far as there are.
    """

    spelled: Mapping[int, bytes]
    marks: Mapping[str, int]
    roles: Mapping[str, int]

    @property
    def size(self) -> int:
        """The largest id and one."""
        return max((*self.spelled, *self.marks.values()), default=-1) + 1

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """The token of some bytes; of several the last, since SentencePiece's single bytes come before its pieces."""
        return {spelled: token for token, spelled in sorted(self.spelled.items())}

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self.ids), default=0)

    @cached_property
    def first_bytes(self) -> np.ndarray:
        """The byte that each token begins with, int64 [size]; :data:`NO_TEXT` for those that are none."""
        first = np.full(self.size, NO_TEXT, dtype=np.int64)
        for token, spelled in self.spelled.items():
            first[token] = spelled[0] if spelled else NO_TEXT
        return first

    @cached_property
    def ordered(self) -> list[bytes]:
        """The bytes of all tokens in order: those that begin alike side by side."""
        return sorted(self.ids)

    @cached_property
    def ordered_ids(self) -> Tensor:
        """Their ids, int64 [tokens]."""
        return torch.tensor([self.ids[spelled] for spelled in self.ordered], dtype=torch.int64, device="cpu")

    def beginning(self, text: bytes, *, longer: bool = False) -> Tensor:
        """The tokens that begin with ``text``, or those that go on behind it, int64 [n]."""
        first = bisect_left(self.ordered, text)
        last = bisect_left(self.ordered, text + b"\xff" * 8, first)  # no text has so many of these bytes in a row
        same = first < last and self.ordered[first] == text
        return self.ordered_ids[first + (longer and same) : last]

    @cached_property
    def contents(self) -> dict[int, str]:
        """Contents of the marks, by id."""
        return {token: content for content, token in self.marks.items()}

    def counterpart(self, token: int, other: Vocabulary) -> int | None:
        """The token here that is ``token`` of another vocabulary: of the same bytes, content or role."""
        if token in other.spelled:
            return self.ids.get(other.spelled[token])
        mark = self.marks.get(other.contents.get(token, ""))
        same = [role for role, its in other.roles.items() if its == token and role in self.roles]
        return self.roles[same[0]] if mark is None and same else mark

    def rank(self, token: int, other: Vocabulary) -> tuple[bool, int, int]:
        """Order of the marks: those that another vocabulary has too, then by role: padding may end a text there."""
        roles = [place for place, role in enumerate(ROLES) if self.roles.get(role) == token]
        return self.contents[token] not in other.marks, min(roles, default=len(ROLES)), token

    def last_of(self, text: bytes) -> int | None:
        """The longest token that ``text`` ends with."""
        return next((self.ids[text[i:]] for i in range(len(text)) if text[i:] in self.ids), None)

    @classmethod
    def of(cls, tokenizer: Any, name: str) -> Vocabulary:
        """The vocabulary of a tokenizer, which an error calls ``name``; read once, as long as it has as many tokens.

        Raises:
            TypeError: no tokenizer of transformers.
            ValueError: its tokens are no bytes that are known here.
        """
        check_tokenizer(tokenizer, name)
        return _once(tokenizer, tokenizer, lambda: _read(tokenizer, name))


_known: WeakKeyDictionary[Any, WeakKeyDictionary[Any, tuple[Any, Any]]] = WeakKeyDictionary()


def _once(tokenizer: Any, other: Any, find: Callable[[], Any]) -> Any:
    """Find something of a tokenizer, which is ``other`` then, or of two: once as long as they have as many tokens."""
    known, sizes = _known.setdefault(tokenizer, WeakKeyDictionary()), (len(tokenizer), len(other))
    if known.get(other, (None,))[0] != sizes:
        known[other] = sizes, find()
    return known[other][1]


def check_tokenizer(tokenizer: Any, name: str) -> None:
    """Raise unless this has what is asked of a tokenizer of transformers.

    Raises:
        TypeError: the argument ``name``, and what came.
    """
    needed = ("get_vocab", "decode", "__call__", "__len__")
    if isinstance(tokenizer, type) or not all(callable(getattr(tokenizer, method, None)) for method in needed):
        raise TypeError(
            f"{name}: expected a tokenizer of transformers, got {named(tokenizer)}; load it by "
            "AutoTokenizer.from_pretrained"
        )


def _read(tokenizer: Any, name: str) -> Vocabulary:
    pieces = tokenizer.get_vocab()
    added = {int(token): str(content) for token, content in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    special = {int(token) for token in getattr(tokenizer, "all_special_ids", ())} | added.keys()
    ordinary = {token: piece for piece, token in pieces.items() if token not in special}
    marks = {added.get(token, piece): token for piece, token in pieces.items() if token in special}
    roles = {role: getattr(tokenizer, f"{role}_token_id", None) for role in ROLES}
    spelled = spelling(ordinary, f"{name}: the tokens of {type(tokenizer).__name__}")
    return Vocabulary(spelled, marks, {role: int(token) for role, token in roles.items() if token is not None})


def spelling(pieces: Mapping[int, str], what: str) -> dict[int, bytes]:
    """Bytes of the pieces of a vocabulary, by id.

    Raises:
        ValueError: the pieces are neither byte-level nor SentencePiece's; ``what`` they are of.
    """
    if {*"".join(pieces.values())} <= LETTERS.keys():
        return {token: bytes(LETTERS[letter] for letter in piece) for token, piece in pieces.items()}
    if not any(SPACE in piece for piece in pieces.values()):
        raise ValueError(
            f"{what} are neither byte-level (as GPT-2's) nor SentencePiece's (as Llama 2's), so their bytes are not "
            "known; use a draft of the target's own tokenizer"
        )
    return {
        token: bytes([int(byte[1], 16)]) if (byte := BYTE.fullmatch(piece)) else piece.replace(SPACE, " ").encode()
        for token, piece in pieces.items()
    }


@dataclass(frozen=True)
class SharedTokens:
    """The meaning of a target's tokens to a draft of another tokenizer, on the CPU.

    Attributes:
        same: int64 [target's tokens], the draft's token of the same bytes, content or role; −1 for none.
        reads: int64 [target's tokens], what the draft reads in place of each: that, else the longest of its tokens
            that the bytes end with.
        part: ordinary tokens of two bytes or more that are shared, of the larger vocabulary's; single bytes most have.
    """

    same: Tensor
    reads: Tensor
    part: float

    @classmethod
    def of(cls, target: Vocabulary, draft: Vocabulary) -> SharedTokens:
        """Compare two vocabularies."""
        same, reads = [-1] * target.size, [draft.roles.get("unk", draft.roles.get("eos", 0))] * target.size
        taken, shared = set[int](), 0
        marks = sorted(target.contents, key=lambda token: target.rank(token, draft))
        for token in (*sorted(target.spelled, reverse=True), *marks):
            other = draft.counterpart(token, target)
            # Of two tokens of the same bytes one alone can follow: the one that the tokenizer gives.
            if other is not None and other not in taken:
                same[token] = other
                taken.add(other)
                shared += len(target.spelled.get(token, b"")) > 1
            if other is None and token in target.spelled:
                other = draft.last_of(target.spelled[token])
            if other is not None:
                reads[token] = other
        most = max(sum(len(spelled) > 1 for spelled in own.spelled.values()) for own in (target, draft))
        ours, read = (torch.tensor(ids, dtype=torch.int64, device="cpu") for ids in (same, reads))
        return cls(ours, read, shared / max(1, most))


@dataclass(frozen=True)
class Translation:
    """The tokenizers of a target and of its draft, which differ, and what is known of their tokens.

    Attributes:
        tokenizer, assistant_tokenizer: of target and draft.
        target, draft: their vocabularies.
        shared: what the target's tokens are to the draft.
    """

    tokenizer: Any
    assistant_tokenizer: Any
    target: Vocabulary
    draft: Vocabulary
    shared: SharedTokens

    @classmethod
    def between(cls, tokenizer: Any, assistant_tokenizer: Any) -> Translation | None:
        """Compare two tokenizers; ``None`` where their tokens are the same. Read once, as vocabularies are.

        Raises:
            TypeError, ValueError: see :meth:`Vocabulary.of`.
        """
        both = {"tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer}
        for name, one in both.items():
            check_tokenizer(one, name)

        def find() -> tuple[Any, ...] | None:
            if tokenizer.get_vocab() == assistant_tokenizer.get_vocab():
                return None
            target, draft = (Vocabulary.of(one, name) for name, one in both.items())
            return target, draft, SharedTokens.of(target, draft)

        found = None if tokenizer is assistant_tokenizer else _once(*both.values(), find)
        return None if found is None else cls(*both.values(), *found)

    def check(self, target: PreTrainedModel, draft: PreTrainedModel) -> None:
        """Raise unless the models have the tokens of their tokenizers.

        Raises:
            ValueError: a tokenizer has a token that its model has no row for.
        """
        for name, own, whose, model in (
            ("tokenizer", self.target, "the target", target),
            ("assistant_tokenizer", self.draft, "the draft model", draft),
        ):
            if own.size > vocabulary(model):
                raise ValueError(
                    f"{name}: its largest id is {own.size - 1}, and {whose} has {vocabulary(model)} tokens; pass the "
                    "tokenizer that the model was trained with"
                )


@dataclass(frozen=True)
class Spelled:
    """Tokens of a text.

    Attributes:
        tokens: ids.
        ends: bytes of the text up to the end of each.
        covered: bytes of the text that were read; what is left has no token, or is a character that is not whole.
    """

    tokens: list[int]
    ends: list[int]
    covered: int


class Speller:
    """Gives the tokens of bytes.

    Args:
        tokenizer: of a model; it is asked without special tokens.
        vocabulary: its own.
        skips: leave out bytes that have no token, rather than end before them.
    """

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary, *, skips: bool = False) -> None:
        self.tokenizer, self.vocabulary, self.skips = tokenizer, vocabulary, skips

    def spell(self, jobs: Sequence[tuple[bytes, bytes]]) -> list[Spelled]:
        """Tokens of texts, each behind other text: as the tokenizer cuts both together.

        Where a token of both together lies across the border, the part of it behind the border is cut into the longest
        tokens; so is all of a text that the tokenizer would change, or that is not UTF-8.

        Args:
            jobs: what comes before, and the text.
        """
        wholes = [readable(*job) for job in jobs]
        texts = [whole.decode() for whole, _ in filter(None, wholes)]
        token_ids = iter(self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else ())
        spelled = []
        for (_, text), whole in zip(jobs, wholes, strict=True):
            if whole is None:
                spelled.append(self.longest(text))
            else:
                spelled.append(self._behind(next(token_ids), *whole) or self.longest(whole[0][whole[1] :]))
        return spelled

    def _behind(self, tokens: list[int], whole: bytes, border: int) -> Spelled | None:
        """Of the tokens of ``whole`` those behind the first ``border`` bytes; ``None`` where it has others."""
        pieces = [self.vocabulary.spelled.get(token, b"\xff") for token in tokens]  # a special token is no text
        joined = b"".join(pieces)
        if joined not in (whole, b" " + whole):  # SentencePiece puts one before a text
            return None
        shift = border + len(joined) - len(whole)
        start = shift if border or whole.startswith(b" ") else 0
        stops = list(accumulate(map(len, pieces), initial=0))  # in what was joined
        first = bisect_left(stops, start)
        cut = self.longest(joined[start : stops[first]])  # of a token across the border
        ends = [stop - shift for stop in stops[first + 1 :]]
        return Spelled(cut.tokens + tokens[first:], cut.ends + ends, len(whole) - border)

    def longest(self, text: bytes) -> Spelled:
        """The longest tokens one after the other."""
        tokens, ends, at, ids = [], [], 0, self.vocabulary.ids
        while at < len(text):
            most = min(len(text), at + self.vocabulary.longest)
            end = next((end for end in range(most, at, -1) if text[at:end] in ids), None)
            if end is None and not self.skips:
                break
            if end is not None:
                tokens.append(ids[text[at:end]])
                ends.append(end)
            at = at + 1 if end is None else end
        return Spelled(tokens, ends, at)


def readable(before: bytes, text: bytes) -> tuple[bytes, int] | None:
    """Both together from a whole character to a whole character, and where ``text`` begins; ``None``: not UTF-8."""
    before = before.lstrip(bytes(range(0x80, 0xC0)))
    whole = before + text
    try:
        _, length = codecs.utf_8_decode(whole)  # of an incomplete character at the end nothing
    except UnicodeDecodeError:
        return None
    return whole[:length], min(len(before), length)
