"""Texts that were read, tables, corpora and graphs that go on from them, shared by the tests of every backend."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from graphs import drafted
from ops.contracts.step import Case
from torch import Tensor
from torch.nn.functional import pad

import gsd_kernels as gsd
from gsd_kernels.ops.corpus import SortedCorpus, corpus_recall, sort_corpus
from gsd_kernels.ops.history import WEIGHTS, Recollection, Seen, history_append, history_recall
from gsd_kernels.ops.recall_levels import recall_levels


@dataclass(frozen=True)
class Memory:
    """A table and calls that fill it: few different tokens, so that contexts come again and sets overflow."""

    capacity: int = 32
    ways: int = 4
    max_context: int = 3
    branch: int = 2
    vocab: int = 3
    rows: tuple[int, ...] = (25, 7)  # of every call
    batch: int = 2
    seed: int = 0

    def empty(self, device: str = "cpu") -> gsd.NgramTable:
        sizes = {"capacity": self.capacity, "max_context": self.max_context, "ways": self.ways}
        return gsd.NgramTable.empty(self.batch, self.branch, device, **sizes)

    def entries(self, rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Contexts [B, M, max_context + 1], some cut short by −1, continuations, and which to take."""
        gen = torch.Generator().manual_seed(1000 * self.seed + seed)
        shape = (self.batch, rows)
        contexts = torch.randint(0, self.vocab, (*shape, self.max_context + 1), generator=gen)
        absent = torch.rand(contexts.shape, generator=gen) < 0.1
        return (
            torch.where(absent, -1, contexts).int(),
            torch.randint(-1, 1000, (*shape, self.branch), generator=gen).int(),
            torch.rand(*shape, self.branch, generator=gen).log(),
            torch.rand(shape, generator=gen) < 0.8,
        )

    def calls(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        return [self.entries(rows, i) for i, rows in enumerate(self.rows)]

    def queries(self, count: int = 30) -> Tensor:
        return self.entries(count, 99)[0]


MEMORIES = {
    "usual": Memory(),
    "default sizes": Memory(capacity=1 << 15, ways=8, max_context=4, branch=4, vocab=12, rows=(64, 33), batch=1),
    "direct-mapped": Memory(ways=1, capacity=16),
    "one set": Memory(capacity=16, ways=16, vocab=2, rows=(5, 1, 30)),
    "single tokens": Memory(max_context=1, capacity=8, ways=8, vocab=20, branch=1),
    "long contexts": Memory(max_context=8, vocab=2, branch=5, capacity=128, ways=8, rows=(12, 9), batch=1),
    "several chunks": Memory(capacity=64, ways=4, max_context=4, rows=(80, 65), vocab=4, batch=1),
}


def two_sources(seed: int, branch: int, others: int, rows: tuple[int, int] = (2, 5)) -> tuple[Tensor, ...]:
    """Arguments of mix_candidates: shared and absent tokens, ties, a source that has no or all the weight."""
    gen = torch.Generator().manual_seed(seed)
    arguments = []
    for size in (branch, others):
        ids = torch.rand(*rows, size + 3, generator=gen).argsort(-1)[..., :size].int()
        scores = torch.randn(*rows, size + 1, generator=gen)
        log_probs = (scores * 2).round().div(2).log_softmax(-1)[..., :size]
        absent = torch.rand(ids.shape, generator=gen) < 0.2
        arguments += [torch.where(absent, -1, ids), torch.where(absent, float("-inf"), log_probs).contiguous()]
    weight = torch.rand(rows, generator=gen)
    weight[0, :2] = torch.tensor([0.0, 1.0])
    return (*arguments, weight)


def remembered(seed: int, branch: int, rows: tuple[int, int] = (2, 5)) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, log-probabilities and positions for perturb_candidates: absent ones, sure ones, large vocabularies."""
    tokens, log_probs, *_ = two_sources(seed, branch, 1, rows)
    gen = torch.Generator().manual_seed(seed)
    tokens = torch.where(tokens >= 0, tokens + torch.randint(0, 150_000, (*rows, 1), generator=gen).int(), -1)
    tokens[0, 0], log_probs[0, 0] = -1, float("-inf")
    tokens[0, 1, 0], log_probs[0, 1] = 7, float("-inf")
    log_probs[0, 1, 0] = 0.0  # nothing is left for the other tokens
    return tokens, log_probs, torch.randint(0, 1000, rows, generator=gen).int()


def insert_cases() -> Iterator[Case]:
    """Calls one after the other into one table."""
    for case in MEMORIES.values():
        table = case.empty()
        for call in case.calls():
            yield (table, *call), {}
            gsd.ngram_insert(table, *call, backend="reference")


def lookup_cases() -> Iterator[Case]:
    for case in MEMORIES.values():
        table = case.empty()
        for call in case.calls():
            gsd.ngram_insert(table, *call, backend="reference")
        yield (table, case.queries()), {}


def tree_of(case: Memory, seed: int) -> tuple[gsd.TokenGraph, gsd.Rows, Tensor]:
    """A drafted graph of the case's vocabulary, its rows, and the tokens before its root."""
    config = gsd.GraphConfig(depth=3, width=4, branch=case.branch, max_rows=20, merge_context=0)
    graph = drafted(config, batch=case.batch, vocab=case.vocab, seed=seed)
    return graph, gsd.flatten(graph, 20, 6, backend="reference"), graph.contexts[:, 0].contiguous()


def perturb_cases() -> Iterator[Case]:
    for branch in (1, 4, 5, 32):
        keys = {"seed": torch.tensor(-5 - branch), "sequence_ids": torch.tensor([3, 90_000], dtype=torch.int32)}
        yield remembered(branch, branch), keys


def mix_cases() -> Iterator[Case]:
    """Each row's weight given, and looked up in a table of them."""
    for seed, sizes in enumerate([(4, 4), (1, 1), (3, 7), (32, 32)]):
        *sources, weight = two_sources(seed, *sizes)
        yield (*sources, weight), {}
        index = torch.arange(weight.numel(), dtype=torch.int32).view_as(weight)
        yield (*sources, weight.flatten()), {"index": index} if seed else {}


@dataclass(frozen=True)
class Known:
    """A history that has read random texts of few tokens, so that matches are long and sources agree and differ."""

    batch: int = 2
    vocab: int = 4
    text: int = 60  # tokens read
    branch: int = 3
    remembered: int = 8  # continuations of an entry
    learned: bool = False
    runners: int = 8  # that are there
    emitted: int = 3
    weights: str = "random"
    sizes: dict[str, int] = field(default_factory=dict)

    def build(self, backend: str = "reference") -> tuple[Recollection, Tensor]:
        """The history, and its text int32 [B, T], which ends with the root."""
        gen = torch.Generator().manual_seed(self.vocab + self.text)
        table = filled(self.batch, self.remembered, self.vocab, self.text, gen, self.sizes)
        learned = filled(1, 4, self.vocab, 30, gen, {"max_context": 3}) if self.learned else None
        weights = torch.randn(WEIGHTS, generator=gen, dtype=torch.float64)
        if self.weights == "none":
            weights = torch.zeros(WEIGHTS, dtype=torch.float64)
        known = Recollection.empty(table, weights, learned, room=16, hashes=8)
        known.reserve(self.text + 9)
        text = torch.randint(0, self.vocab, (self.batch, self.text + 9), generator=gen).int()
        text[:, 7::11] = -1
        if self.text:
            text[:, -9:] = text[:, 8:17]  # what was said before, and more follows there
        counts = torch.full((self.batch,), text.shape[1], dtype=torch.int32)
        history_append(known, text, counts, backend=backend)
        known.runners[:, : self.runners] = torch.arange(self.runners, dtype=torch.int32) % self.vocab
        known.runner_log_probs.copy_(torch.linspace(-0.3, -5.0, known.runners.shape[1]))
        known.emitted.fill_(self.emitted)
        return known, text

    def graph(self, text: Tensor, levels: int = 3) -> gsd.TokenGraph:
        """A graph whose first children are what the text says after its end."""
        config = gsd.GraphConfig(depth=levels, width=4, branch=self.branch, max_rows=24, merge_context=2)
        graph = gsd.TokenGraph.empty(self.batch, config, "cpu")
        graph.reset(text[:, -1].contiguous(), tail_of(text))
        frontier, gen = graph.root_frontier(), torch.Generator().manual_seed(levels)
        for level in range(levels):
            shape = (*frontier.shape, self.branch)
            tokens = torch.randint(0, self.vocab, shape, generator=gen).int()
            chances = torch.rand(shape, generator=gen).log()
            rest = {"level": level, "width": 4, "merge_context": 2, "backend": "reference"}
            frontier = gsd.merge(graph, frontier, tokens, chances, **rest).node_ids
        return graph


KNOWN = {
    "usual": Known(),
    "with what was learned": Known(learned=True, vocab=6),
    "more than candidates": Known(branch=12, remembered=12, vocab=5),
    "nothing read": Known(text=0, runners=0),
    "runners alone": Known(text=0, vocab=40),
    "long repeats": Known(vocab=2, text=200),
    "short contexts": Known(sizes={"max_context": 2}),
    "ties": Known(weights="none", vocab=9),
    "many sequences": Known(batch=19, vocab=7),
}


def filled(
    batch: int, branch: int, vocab: int, entries: int, gen: torch.Generator, sizes: dict[str, int]
) -> gsd.NgramTable:
    """A table of random continuations, of which some are absent, some the same twice."""
    table = gsd.NgramTable.empty(batch, branch, "cpu", **{"capacity": 256, "max_context": 4, "ways": 8} | sizes)
    contexts = torch.randint(0, vocab, (batch, entries, 5), generator=gen).int()
    following = torch.randint(0, vocab, (batch, entries, branch), generator=gen).int()
    absent = torch.rand(following.shape, generator=gen).cumsum(-1) > 2.0  # the last of a row
    log_probs = (torch.rand(following.shape, generator=gen) / branch).sort(-1, descending=True)[0].log()
    following = torch.where(absent, -1, following)
    if entries:
        known = torch.ones(batch, entries, dtype=torch.bool)
        gsd.ngram_insert(table, contexts, following, log_probs, known, backend="reference")
    return table


def tail_of(text: Tensor) -> Tensor:
    """The tokens before the last one, nearest first, int32 [B, 8]."""
    return pad(text[:, -9:-1].flip(-1), (0, 8), value=-1)[:, :8].contiguous()


def noise(batch: int) -> dict[str, Tensor]:
    sequences = torch.arange(batch, dtype=torch.int32)
    return {"first_pick": sequences + 7, "seed": torch.tensor(-3), "sequence_ids": sequences + 2}


def known_cases(sampled: bool) -> Iterator[Case]:
    for case in KNOWN.values():
        known, text = case.build()
        graph = case.graph(text)
        nodes = torch.arange(-1, min(12, graph.capacity), dtype=torch.int32).repeat(case.batch, 1)
        yield (known, graph, nodes), noise(case.batch) if sampled else {}


def append_cases() -> Iterator[Case]:
    """Four steps: tokens, how many of them, and what the target found likely at the rows."""
    for case in KNOWN.values():
        known, _ = case.build()
        for number in range(4):
            _, rows, tail = tree_of(Memory(batch=case.batch, vocab=case.vocab), number)
            gen = torch.Generator().manual_seed(number)
            shape = (*rows.token_ids.shape, known.table.tokens.shape[2])
            best = torch.randint(-1, case.vocab, shape, generator=gen).int()
            tokens = torch.randint(0, case.vocab, (case.batch, 6), generator=gen).int()
            accepted = torch.randint(-1, shape[1], (case.batch, 6), generator=gen).int()
            seen = Seen(rows, tail, accepted, best, torch.rand(shape, generator=gen).log())
            counts = torch.randint(0, 7, (case.batch,), generator=gen).int()
            yield (known, tokens, counts, None if number == 2 else seen), {}  # once nothing was drafted
            history_append(known, tokens, counts, seen, backend="reference")


def level_cases() -> Iterator[Case]:
    """A history of few tokens, so that look-ups go on for several levels, and a graph; at times behind another level,
    whose frontier may have absent nodes."""
    usual, short = Known(remembered=3), {"min_prob": math.exp(-2.0), "sibling_ratio": 0.5}
    alone = Known(batch=1, branch=1, remembered=1)
    for number, (given, levels, absent, rules) in enumerate(
        [
            (usual, 5, None, {}),
            (usual, 5, 2, {}),
            (Known(batch=1, remembered=3), 5, 4, {}),  # none is given: the next level takes what the graph holds
            (Known(text=0, runners=0), 5, None, {}),
            (Known(vocab=40, text=50), 9, None, {}),
            (usual, 5, None, short),  # runs dry
            (usual, 5, None, {"merge_context": -1}),
            (alone, 1, None, {"width": 1, "history_width": 1}),
            (Known(batch=19, branch=2, remembered=4), 2, 0, {}),  # several threads
        ]
    ):
        known, text = given.build()
        sizes = {"width": 4, "branch": given.branch, "max_rows": 24, "merge_context": 2, "history_width": 4}
        config = gsd.GraphConfig(**sizes | {"depth": int(absent is not None), "history_depth": levels} | rules)
        graph = gsd.TokenGraph.empty(given.batch, config.replace(history_width=8), "cpu")
        graph.reset(text[:, -1].contiguous(), tail_of(text))
        frontier = graph.root_frontier()
        if absent is not None:
            first = torch.arange(given.branch, dtype=torch.int32).expand(given.batch, 1, -1).contiguous()
            chances = torch.linspace(-0.5, -1.5, given.branch).expand(first.shape).contiguous()
            level = {"level": 0, "width": 4, "config": config, "backend": "reference"}
            frontier = gsd.merge(graph, frontier, first, chances, **level).node_ids
            frontier[0, 4 - absent :] = -1
        drawn = noise(given.batch) if number % 3 == 0 else {}
        yield (known, graph, frontier), {"level": config.depth, "config": config, **drawn}


def joined(documents: Sequence[Sequence[int]]) -> np.ndarray:
    return np.array([token for document in documents for token in (*document, -1)], dtype=np.int32)


def indexed(documents: Sequence[Sequence[int]]) -> SortedCorpus:
    text = joined(documents)
    return SortedCorpus(*(torch.from_numpy(array) for array in (text, *sort_corpus(text))))


def graph_of(paths: Sequence[Sequence[int]]) -> gsd.TokenGraph:
    """A graph of one sequence a path: root first, each node below the one before."""
    length = max(len(path) for path in paths)
    graph = gsd.TokenGraph.empty(len(paths), gsd.GraphConfig(depth=1, width=1, branch=4, max_rows=8), "cpu")
    graph.token_ids = torch.full((len(paths), length), 9, dtype=torch.int32)
    graph.parents = (torch.arange(length, dtype=torch.int32) - 1).repeat(len(paths), 1)
    for number, path in enumerate(paths):
        graph.token_ids[number, : len(path)] = torch.tensor(path, dtype=torch.int32)
    return graph


def arguments(corpus: SortedCorpus, texts: Sequence[Sequence[int]], drafted: Sequence[Sequence[int]]) -> list[object]:
    """Texts, left-padded, each with nodes drafted below its root; all nodes and one of padding are asked."""
    length = max(len(text) for text in texts) + 1
    tokens = torch.full((len(texts), length), 7)  # padding that would match
    for row, text in enumerate(texts):
        tokens[row, length - 1 - len(text) : length - 1] = torch.tensor(text)
    start = torch.tensor([length - 1 - len(text) for text in texts], dtype=torch.int32)
    end = torch.full((len(texts),), length - 1, dtype=torch.int32)
    graph = graph_of([[text[-1], *below] for text, below in zip(texts, drafted, strict=True)])
    width = graph.token_ids.shape[1]
    nodes = torch.arange(-1, width, dtype=torch.int32).repeat(len(texts), 1)
    for row, below in enumerate(drafted):
        nodes[row, len(below) + 2 :] = -1
    return [corpus, graph, nodes, tokens, end, start]


def random_documents(seed: int, vocab: int, sizes: tuple[int, ...]) -> list[list[int]]:
    gen = np.random.default_rng(seed)
    return [gen.integers(0, vocab, size).tolist() for size in sizes]


def corpus_cases() -> Iterator[Case]:
    gen = np.random.default_rng(7)
    for documents, vocab in (
        (random_documents(0, 3, (500, 40)), 3),
        (random_documents(1, 50, (2000,)), 50),
        ([[5] * 700], 6),
        ([[1, 2]], 4),
        ([[4]], 5),  # no entry
    ):
        texts = [documents[0][-12:], gen.integers(0, vocab, 30).tolist(), [5]]
        yield tuple(arguments(indexed(documents), texts, [[1, 2, 0], [0], []])), {"vocab": 50}


EQUAL: dict[str, tuple[Any, str, Any]] = {
    "ngram_insert": (gsd.ngram_insert, "cpu cuda", insert_cases),
    "ngram_lookup": (gsd.ngram_lookup, "cpu cuda", lookup_cases),
    "perturb_candidates": (gsd.perturb_candidates, "cpu cuda", perturb_cases),
    "history_append": (history_append, "cpu cuda", append_cases),
    "recall_levels": (recall_levels, "cpu cuda", level_cases),
    "corpus_recall": (corpus_recall, "cpu", corpus_cases),
}
NEARLY_EQUAL = {
    "mix_candidates": (gsd.mix_candidates, "cpu cuda", mix_cases),
    "history_recall": (history_recall, "cpu cuda", partial(known_cases, False)),
    "history_recall-sampled": (history_recall, "cpu cuda", partial(known_cases, True)),
}
"""Whose candidates may be in another order where they are as likely as each other but for rounding."""
