"""Texts that were read, tables, corpora and graphs that go on from them, shared by the tests of every backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from graphs import drafted
from ops.contracts.backends import Backend, assert_bit_equal, check_equal, poisoned
from torch import Tensor
from torch.nn.functional import pad

import gsd_kernels as gsd
from gsd_kernels.ops.corpus import MAX_MATCH, SortedCorpus, sort_corpus
from gsd_kernels.ops.history import WEIGHTS, Recollection, history_append
from gsd_kernels.ops.ngram import ngram_recall, ngram_remember
from gsd_kernels.ops.table import OPS


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


def contents(table: gsd.NgramTable) -> list[Tensor]:
    """The table's tensors as bits."""
    return [table.keys, table.tokens, table.log_probs.view(torch.int32)]


def check_memory(case: Memory, on: Backend) -> None:
    """The table after every call, bit for bit, and what it answers."""
    table = case.empty()
    for call in case.calls():
        _, (table, *_) = check_equal(gsd.ngram_insert, on, table, *call)
    assert (table.keys != 0).any()
    (_, _, matched), _ = check_equal(gsd.ngram_lookup, on, table, case.queries())
    assert 0 in matched and matched.max() >= min(2, case.max_context)


def tree_of(case: Memory, seed: int) -> tuple[gsd.TokenGraph, gsd.Rows, Tensor]:
    """A drafted graph of the case's vocabulary, its rows, and the tokens before its root."""
    config = gsd.GraphConfig(depth=3, width=4, branch=case.branch, max_rows=20, merge_context=0)
    graph = drafted(config, batch=case.batch, vocab=case.vocab, seed=seed)
    return graph, gsd.flatten(graph, 20, 6, backend="reference"), graph.contexts[:, 0].contiguous()


def check_remembered_rows(case: Memory, on: Backend) -> None:
    """The table after steps' rows, and what it recalls after nodes of another graph: with noise within 2e-5."""
    table = case.empty()
    for seed in range(3):
        _, rows, tail = tree_of(case, seed)
        gen = torch.Generator().manual_seed(seed)
        tokens = torch.randint(-1, 1000, (case.batch, 20, case.branch), generator=gen).int()
        log_probs = torch.rand(tokens.shape, generator=gen).log()
        _, (table, *_) = check_equal(ngram_remember, on, table, rows, tail, tokens, log_probs)
    graph, _, _ = tree_of(case, 1)
    nodes = torch.arange(-1, 9, dtype=torch.int32).repeat(case.batch, 1)
    for drawn in ({}, noise(case.batch)):
        most = 2e-5 if drawn else 0.0
        (tokens, log_probs, matched), _ = check_equal(ngram_recall, on, table, graph, nodes, **drawn, most=most)
        assert torch.equal(log_probs == float("-inf"), tokens < 0)
        assert matched.max() >= min(2, case.max_context)


def check_mix(seed: int, branch: int, others: int, on: Backend) -> int:
    """Log-probabilities within 1e-5, tokens equal but for near ties. Returns how many differ."""
    arguments = two_sources(seed, branch, others)
    with poisoned():
        tokens, log_probs = (
            t.cpu() for t in gsd.mix_candidates(*(t.to(on.device) for t in arguments), backend=on.name)
        )
        table = arguments[4].flatten()  # each row's weight looked up instead
        index = torch.arange(table.numel(), dtype=torch.int32).view_as(arguments[4])
        looked_up = gsd.mix_candidates(*on.to((*arguments[:4], table)), index=on.to(index), backend=on.name)
        first = on.to((*arguments[:4], table)), on.to((*arguments[:4], table[0].expand_as(arguments[4]).contiguous()))
        assert_bit_equal(*(gsd.mix_candidates(*given, backend=on.name) for given in first))
    assert torch.equal(looked_up[0].cpu(), tokens) and torch.equal(looked_up[1].cpu(), log_probs)
    expected, expected_log_probs = gsd.mix_candidates(*arguments, backend="reference")
    assert tokens.dtype == torch.int32 and torch.equal(tokens < 0, expected < 0)
    assert torch.equal(log_probs == float("-inf"), expected < 0)
    real = expected >= 0
    most = OPS["mix_candidates"].tolerance
    torch.testing.assert_close(log_probs[real], expected_log_probs[real], atol=most, rtol=0)
    differ = (tokens != expected).nonzero().tolist()
    for b, row, place in differ:  # the token must be elsewhere in the expected order, or just beyond its end
        near = (expected_log_probs[b, row] - expected_log_probs[b, row, place]).abs() <= most
        assert near.sum() > 1 or place == branch - 1, (expected[b, row], tokens[b, row])
    return len(differ)


def check_perturbed(seed: int, branch: int, on: Backend) -> None:
    """The same noise to the bit, log-probabilities within 1e-5 (relative to 22, the largest noise)."""
    inputs = remembered(seed, branch)
    keys = {"seed": torch.tensor(-5 - seed), "sequence_ids": torch.tensor([3, 90_000], dtype=torch.int32)}
    found, _ = check_equal(gsd.perturb_candidates, on, *inputs, **keys, most=OPS["perturb_candidates"].tolerance)
    assert torch.equal(found == float("-inf"), (inputs[0] < 0) | (inputs[1] == float("-inf")))


def check_captured_memory(on: Backend) -> None:
    """An insertion and a look-up captured in a CUDA graph, replayed with other contents of the same tensors."""
    case = Memory(capacity=128, ways=8, max_context=4, branch=4, vocab=5, rows=(64, 64, 64))
    ours, theirs, calls = case.empty(on.device), case.empty(), case.calls()
    inputs = [t.to(on.device) for t in calls[0]]
    asked = case.queries().to(on.device)

    def step() -> tuple[Tensor, ...]:
        gsd.ngram_insert(ours, *inputs, backend=on.name)
        return gsd.ngram_lookup(ours, asked, backend=on.name)

    step()
    gsd.ngram_insert(theirs, *calls[0], backend="reference")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answers = step()
    for call in calls[1:]:
        for static, new in zip(inputs, call, strict=True):
            static.copy_(new)
        graph.replay()
        gsd.ngram_insert(theirs, *call, backend="reference")
        for got, expected in zip(contents(ours), contents(theirs), strict=True):
            assert torch.equal(got.cpu(), expected)
        for got, expected in zip(answers, gsd.ngram_lookup(theirs, case.queries(), backend="reference"), strict=True):
            assert torch.equal(got.cpu(), expected)


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
    "one sequence": Known(batch=1, branch=2, emitted=0),
    "few remembered": Known(branch=1, remembered=1, vocab=3),
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


def close_candidates(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], atol: float) -> None:
    """Equal but for rounding: of candidates as likely as each other any order."""
    (tokens, log_probs), (other_tokens, others) = got[:2], expected[:2]
    assert torch.equal(tokens < 0, other_tokens < 0) and torch.equal(log_probs == -torch.inf, tokens < 0)
    torch.testing.assert_close(log_probs, others, atol=atol, rtol=0)
    for at in (tokens != other_tokens).nonzero().tolist():
        chances = others[tuple(at[:-1])]
        near = (chances - chances[at[-1]]).abs() <= 2 * atol
        assert near.sum() > 1 or at[-1] == chances.shape[0] - 1


def changed(case: Known, **changes: object) -> Known:
    return replace(case, **changes)


VOCAB = 50


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


def what_followed(documents: Sequence[Sequence[int]], context: Sequence[int], vocab: int = VOCAB) -> tuple[dict, int]:
    """Probabilities of what followed a context (nearest token last), as the op's docstring defines them; few enough
    occurrences that all are counted."""
    context = list(context)[-MAX_MATCH:]

    def following(n: int) -> list[int]:
        found = []
        for d in documents:
            found += [d[i + 1] for i in range(n - 1, len(d) - 1) if list(d[i - n + 1 : i + 1]) == context[-n:]]
        return found

    matched = max((n for n in range(1, len(context) + 1) if following(n)), default=0)
    probs, rest, n = Counter(), 1.0, matched
    for _ in range(3):
        if n == 0:
            break
        counts = Counter(token for token in following(n) if token < vocab)
        total, unseen = sum(counts.values()), len(counts) / n
        assert len(following(n)) <= 64, "too many to compare"
        for token, count in counts.items():
            probs[token] += rest * count / (total + unseen)
        rest *= unseen / (total + unseen) if total else 1.0
        n = 0 if total >= 32 else n // 2
    return dict(probs), matched if probs else 0


def contexts_of(texts: Sequence[Sequence[int]], drafted: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """The context of every asked node of :func:`arguments` but the first, which is padding."""
    return [[[*text, *below[:n]] for n in range(len(below) + 1)] for text, below in zip(texts, drafted, strict=True)]


def answers(found: tuple[Tensor, Tensor, Tensor], row: int, node: int) -> tuple[dict[int, float], int]:
    tokens, log_probs, matched = (t[row, node] for t in found)
    return {int(t): float(p.exp()) for t, p in zip(tokens, log_probs, strict=True) if t >= 0}, int(matched)
