"""Insertions, look-ups and candidates for the n-gram ops, shared by their tests on every backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from graphs import drafted
from ops.contracts.backends import Backend
from torch import Tensor

import gsd_kernels as gsd
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


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors begin as NaN and as the largest integers, so that what an op leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def contents(table: gsd.NgramTable) -> list[Tensor]:
    """The table's tensors as bits."""
    return [table.keys, table.tokens, table.log_probs.view(torch.int32)]


def check_memory(case: Memory, on: Backend) -> None:
    """The table after every call, bit for bit, and what it answers."""
    ours, theirs = case.empty(on.device), case.empty()
    for call in case.calls():
        gsd.ngram_insert(ours, *(t.to(on.device) for t in call), backend=on.name)
        gsd.ngram_insert(theirs, *call, backend="reference")
        for got, expected in zip(contents(ours), contents(theirs), strict=True):
            assert torch.equal(got.cpu(), expected)
    assert (theirs.keys != 0).any()
    with poisoned():
        answers = gsd.ngram_lookup(ours, case.queries().to(on.device), backend=on.name)
    expected = gsd.ngram_lookup(theirs, case.queries(), backend="reference")
    for got, answer in zip(answers, expected, strict=True):
        assert got.dtype == answer.dtype and torch.equal(got.cpu(), answer)
    assert 0 in expected[2] and expected[2].max() >= min(2, case.max_context)


def tree_of(case: Memory, seed: int) -> tuple[gsd.TokenGraph, gsd.Rows, Tensor]:
    """A drafted graph of the case's vocabulary, its rows, and the tokens before its root."""
    config = gsd.GraphConfig(depth=3, width=4, branch=case.branch, max_rows=20, merge_context=0)
    graph = drafted(config, batch=case.batch, vocab=case.vocab, seed=seed)
    return graph, gsd.flatten(graph, 20, 6, backend="reference"), graph.contexts[:, 0].contiguous()


def check_remembered_rows(case: Memory, on: Backend) -> None:
    """The table after steps' rows, and what it recalls after nodes of another graph: with noise within 2e-5."""
    ours, theirs = case.empty(on.device), case.empty()
    for seed in range(3):
        _, rows, tail = tree_of(case, seed)
        gen = torch.Generator().manual_seed(seed)
        tokens = torch.randint(-1, 1000, (case.batch, 20, case.branch), generator=gen).int()
        log_probs = torch.rand(tokens.shape, generator=gen).log()
        for table, to, name in ((ours, on.to, on.name), (theirs, lambda x: x, "reference")):
            ngram_remember(table, to(rows), *to((tail, tokens, log_probs)), backend=name)
        for got, expected in zip(contents(ours), contents(theirs), strict=True):
            assert torch.equal(got.cpu(), expected)
    graph, _, _ = tree_of(case, 1)
    nodes = torch.arange(-1, 9, dtype=torch.int32).repeat(case.batch, 1)
    sequences, first = torch.arange(case.batch, dtype=torch.int32) + 3, torch.arange(case.batch, dtype=torch.int32)
    for noise in ({}, {"first_pick": first, "seed": torch.tensor(-77), "sequence_ids": sequences}):
        with poisoned():
            got = ngram_recall(ours, on.to(graph), on.to(nodes), **on.to(noise), backend=on.name)
        expected = ngram_recall(theirs, graph, nodes, **noise, backend="reference")
        assert torch.equal(got[0].cpu(), expected[0]) and torch.equal(got[2].cpu(), expected[2])
        most = 2e-5 if noise else 0
        torch.testing.assert_close(got[1].cpu(), expected[1], atol=most, rtol=0)
        assert torch.equal(expected[1] == float("-inf"), expected[0] < 0)
        assert expected[2].max() >= min(2, case.max_context)


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
    sequences = torch.tensor([3, 90_000], dtype=torch.int32)
    found = []
    for device, name in ((on.device, on.name), ("cpu", "reference")):
        keys = {"seed": torch.tensor(-5 - seed, device=device), "sequence_ids": sequences.to(device)}
        with poisoned():
            found.append(gsd.perturb_candidates(*(t.to(device) for t in inputs), **keys, backend=name).cpu())
    ours, theirs = found
    assert torch.equal(ours == float("-inf"), theirs == float("-inf"))
    assert torch.equal(theirs == float("-inf"), (inputs[0] < 0) | (inputs[1] == float("-inf")))
    torch.testing.assert_close(ours, theirs, atol=OPS["perturb_candidates"].tolerance, rtol=0)


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
