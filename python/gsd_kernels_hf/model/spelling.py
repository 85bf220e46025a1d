"""Bytes as the tokens that a tokenizer gives for them, behind other text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from .vocabulary import Vocabulary


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
        joined, space = b"".join(pieces), 0
        if joined == b" " + whole:  # SentencePiece puts one before a text
            space = 1
        elif joined != whole:
            return None
        start = border + space if border or whole.startswith(b" ") else 0
        ends = [end - border - space for end in accumulate(map(len, pieces))]
        first = next((i for i, end in enumerate(ends) if end + border + space > start), len(ends))
        begin = ends[first - 1] + border + space if first else 0
        length = len(whole) - border
        if begin == start:
            return Spelled(tokens[first:], ends[first:], length)
        cut = self.longest(joined[start : ends[first] + border + space])
        return Spelled(cut.tokens + tokens[first + 1 :], cut.ends + ends[first + 1 :], length)

    def longest(self, text: bytes) -> Spelled:
        """The longest tokens one after the other."""
        tokens, ends, at, ids = [], [], 0, self.vocabulary.ids
        while at < len(text):
            possible: Iterable[int] = range(min(len(text), at + self.vocabulary.longest), at, -1)
            end = next((end for end in possible if text[at:end] in ids), None)
            if end is None and not self.skips:
                break
            if end is not None:
                tokens.append(ids[text[at:end]])
                ends.append(end)
            at = at + 1 if end is None else end
        return Spelled(tokens, ends, at)


def readable(before: bytes, text: bytes) -> tuple[bytes, int] | None:
    """Both together from a whole character to a whole character, and where ``text`` begins; ``None``: not UTF-8."""
    while before and 0x80 <= before[0] < 0xC0:
        before = before[1:]
    whole = before + text
    try:
        whole.decode()
    except UnicodeDecodeError as error:
        if error.end < len(whole) or error.reason != "unexpected end of data":
            return None
        whole = whole[: error.start]
    return whole, min(len(before), len(whole))
