"""A slow, sequential, independent statement of the n-gram table: no tensor code shared."""

from __future__ import annotations

from collections import OrderedDict


def context_key(context: tuple[int, ...]) -> int:
    """The 64 bits under which the n-gram table files a context, as the signed number that it stores."""
    key = 0
    for token in context:
        key = (key ^ (token + 1)) * 0x9E3779B97F4A7C15 % 2**64
        signed = key - 2**64 if key >= 2**63 else key
        key ^= (signed >> 29) % 2**64
    key = (key + len(context) - 1) % 2**64 | 1
    return key - 2**64 if key >= 2**63 else key


class NgramTable:
    """One sequence's table: a dictionary for every set, its least recently inserted context first."""

    def __init__(self, capacity: int, ways: int, max_context: int) -> None:
        self.sets: list[OrderedDict[tuple[int, ...], object]] = [OrderedDict() for _ in range(capacity // ways)]
        self.ways, self.max_context = ways, max_context

    def set_of(self, context: tuple[int, ...]) -> OrderedDict[tuple[int, ...], object]:
        return self.sets[(context_key(context) >> 17) % len(self.sets)]

    def known_lengths(self, context: list[int]) -> list[tuple[int, ...]]:
        """The context's beginnings that are real text."""
        lengths = [tuple(context[:n]) for n in range(1, self.max_context + 1)]
        return [c for c in lengths if min(c) >= 0]

    def insert(self, context: list[int], continuation: object) -> None:
        for part in self.known_lengths(context):
            entries = self.set_of(part)
            entries[part] = continuation
            entries.move_to_end(part)
            if len(entries) > self.ways:
                entries.popitem(last=False)

    def lookup(self, context: list[int]) -> tuple[object, int]:
        found = [part for part in self.known_lengths(context) if part in self.set_of(part)]
        return (self.set_of(found[-1])[found[-1]], len(found[-1])) if found else (None, 0)
