"""Slow, sequential, independent statements of merge, flatten and the n-gram table: no tensor code shared."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

F32 = np.float32


@dataclass
class OracleGraph:
    tokens: list[int]
    tail: list[int]  # nearest first, −1 where the text begins
    parents: list[int] = field(default_factory=lambda: [-1])
    scores: list[np.float32] = field(default_factory=lambda: [F32(0)])
    edges: dict[int, list[tuple[int, np.float32] | None]] = field(default_factory=dict)
    merges: int = 0

    def context(self, node: int) -> list[int]:
        """The tokens before a node, nearest first, running on into the emitted text."""
        out, up = [], self.parents[node]
        while up >= 0:
            out.append(self.tokens[up])
            up = self.parents[up]
        return (out + self.tail)[:8]


def agreement(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n] and a[n] >= 0:
        n += 1
    return n


def plus(a, b):
    """Their float32 sum, which may be −inf."""
    with np.errstate(over="ignore"):
        return F32(a + b)


def merge(graph, frontier, tokens, log_probs, width, merge_context, log_sibling_ratio, log_min_prob):
    existing = len(graph.tokens)
    candidates = []
    for i, u in enumerate(frontier):
        if u < 0:
            continue
        likely = [min(lp, 0.0) for lp in log_probs[i]]  # above 0 counts as 0
        best = max((F32(lp) for lp in likely if lp > -np.inf), default=None)
        graph.edges[u] = [None] * len(tokens[i])
        seen = set()
        for rank, (token, lp) in enumerate(zip(tokens[i], likely, strict=True)):
            if not lp > -np.inf or token < 0 or F32(lp) < F32(best + F32(log_sibling_ratio)) or token in seen:
                continue
            seen.add(token)
            candidates.append((plus(graph.scores[u], F32(lp)), u, rank, int(token), F32(lp)))
    candidates.sort(key=lambda c: (-c[0], c[1], c[2]))
    leaders = {}
    for score, u, rank, token, lp in candidates:
        context = [graph.tokens[u], *graph.context(u)][:8]
        best = None
        for v in range(u + 1, existing):
            n = agreement(context, graph.context(v))
            if merge_context >= 0 and graph.tokens[v] == token and n >= merge_context:
                key = (-n, -graph.scores[v], v)
                best = min(best, key) if best else key
        needed = context[: max(merge_context, 0)]
        key = (token, tuple(needed))
        can_share = merge_context >= 0 and len(needed) >= merge_context and min(needed, default=0) >= 0
        if best:
            target = best[2]
            graph.merges += 1
        elif can_share and key in leaders:
            target = leaders[key]
            graph.merges += 1
        else:
            target = len(graph.tokens)
            graph.tokens.append(token)
            graph.parents.append(u)
            graph.scores.append(score)
            if can_share:
                leaders[key] = target
        graph.edges[u][rank] = (target, lp)
    closed = [n in graph.edges or not graph.scores[n] > -np.inf for n in range(len(graph.tokens))]
    open_nodes = [n for n, score in enumerate(graph.scores) if not closed[n] and score >= log_min_prob]
    open_nodes.sort(key=lambda n: (-graph.scores[n], n))
    return (open_nodes + [-1] * width)[:width]


def flatten(graph, max_rows, max_path):
    """Best first from a heap; returns rows as (node, parent row, depth, path score)."""
    rows, heap = [], [(F32(-0.0), 0, -1, 0, 0)]  # (−score, depth, parent row, edge index, node)
    while heap and len(rows) < max_rows:
        minus, depth, parent, _, node = heapq.heappop(heap)
        row = len(rows)
        rows.append((node, parent, depth, F32(-minus)))
        if depth == max_path:
            continue
        for index, edge in enumerate(graph.edges.get(node, [])):
            if edge is not None and (score := plus(F32(-minus), edge[1])) > -np.inf:
                heapq.heappush(heap, (F32(-score), depth + 1, row, index, edge[0]))
    return rows


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
