"""What was said before: the n-gram table, candidates of two sources, the history's mixture, the sorted corpus."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.contracts.backends import assert_bit_equal, backends
from ops.contracts.ngram import (
    Known,
    Memory,
    arguments,
    indexed,
    random_documents,
    two_sources,
)

import gsd_kernels as gsd
from gsd_kernels.ops.corpus import MAX_MATCH, SortedCorpus, corpus_recall
from gsd_kernels.ops.history import WEIGHTS, Recollection, history_append

pytestmark = pytest.mark.quick


def context_key(context: tuple[int, ...]) -> int:
    """The 64 bits under which the n-gram table files a context, as the signed number that it stores."""
    key = 0
    for token in context:
        key = (key ^ (token + 1)) * 0x9E3779B97F4A7C15 % 2**64
        signed = key - 2**64 if key >= 2**63 else key
        key ^= (signed >> 29) % 2**64
    key = (key + len(context) - 1) % 2**64 | 1
    return key - 2**64 if key >= 2**63 else key


class Sets:
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


@st.composite
def memories(draw):
    ways = draw(st.sampled_from((1, 2, 4, 8, 16)))
    return Memory(
        capacity=ways * draw(st.sampled_from((1, 2, 8, 64))),
        ways=ways,
        max_context=draw(st.integers(1, 5)),
        branch=draw(st.integers(1, 3)),
        vocab=draw(st.integers(1, 12)),
        rows=tuple(draw(st.lists(st.integers(0, 70), min_size=1, max_size=4))),
        seed=draw(st.integers(0, 10**6)),
    )


@backends("reference", "cpu")
@settings(max_examples=40, deadline=None)
@given(memories())
def test_every_set_holds_what_was_inserted_last_in_order(on, case):
    table = case.empty()
    expected = [Sets(case.capacity, case.ways, case.max_context) for _ in range(case.batch)]
    for contexts, tokens, log_probs, valid in case.calls():
        gsd.ngram_insert(table, contexts, tokens, log_probs, valid, backend=on.name)
        for b, m in valid.nonzero().tolist():
            expected[b].insert(contexts[b, m].tolist(), (tokens[b, m].tolist(), log_probs[b, m].tolist()))
    free = (0, [-1] * case.branch, [0.0] * case.branch)
    for b, memory in enumerate(expected):
        got = list(zip(*(t[b].tolist() for t in (table.keys, table.tokens, table.log_probs)), strict=True))
        for s, entries in enumerate(memory.sets):
            listed = [(context_key(context), *entry) for context, entry in reversed(entries.items())]
            listed += [free] * (case.ways - len(listed))
            assert got[s * case.ways : (s + 1) * case.ways] == listed

    queries = case.queries()
    tokens, log_probs, matched = gsd.ngram_lookup(table, queries, backend=on.name)
    for b, memory in enumerate(expected):
        for w in range(queries.shape[1]):
            entry, length = memory.lookup(queries[b, w].tolist())
            assert matched[b, w] == length
            nothing = ([-1] * case.branch, [-math.inf] * case.branch)
            assert (tokens[b, w].tolist(), log_probs[b, w].tolist()) == (entry or nothing)


@backends("cpu", "reference")
def test_a_text_in_pieces_is_the_text_at_once_as_far_as_there_is_room(on):
    text = torch.randint(-1, 3, (2, 300), generator=torch.Generator().manual_seed(0)).int()
    case, pieces = Known(text=0, runners=0), []
    for size in (300, 7):
        known = Recollection.empty(*(getattr(case.build()[0], name) for name in ("table", "weights")), room=16)
        assert known.reserve(290) and not known.reserve(289)
        for piece in text.split(size, 1):
            counts = torch.full((2,), piece.shape[1], dtype=torch.int32)
            history_append(known, piece, counts, backend=on.name)
        pieces.append([known.text, known.length, known.heads, known.previous])
        assert known.length.tolist() == [290, 290] and torch.equal(known.text, text[:, :290])
    assert_bit_equal(*pieces)
    known.clear()
    assert known.length.tolist() == [0, 0] and not known.heads.any()


TABLE = partial(gsd.NgramTable.empty, 1, 3, "cpu")
HISTORY = partial(
    Recollection.empty, gsd.NgramTable.empty(2, 4, "cpu"), weights=torch.zeros(WEIGHTS, dtype=torch.float64)
)
LOOKUP, MIX = partial(gsd.ngram_lookup, TABLE()), partial(gsd.mix_candidates, *two_sources(0, 4, 3))


@pytest.mark.parametrize(
    ("make", "wrong", "match"),
    [
        (TABLE, {"capacity": 100}, "capacity: expected a power of two of at least ways=8, got 100"),
        (TABLE, {"max_context": 9}, "max_context: expected 1 … 8, got 9"),
        (HISTORY, {"weights": torch.zeros(3, dtype=torch.float64)}, "weights: expected shape"),
        (HISTORY, {"hashes": 12}, "hashes: expected a power of two, got 12"),
        (HISTORY, {"learned": gsd.NgramTable.empty(2, 4, "cpu")}, "learned.keys: expected shape"),
        (LOOKUP, {"contexts": torch.zeros(1, 5, 3).int()}, "contexts: expected at least max_context=4 tokens of each"),
        (MIX, {"index": torch.zeros(2, 5).int()}, "weight: expected a table with an index"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tables_that_cannot_be_are_refused(make, wrong, match):
    with pytest.raises((TypeError, ValueError), match=match):
        make(**wrong)


few = st.integers(0, 3)
documents = st.lists(st.lists(few, max_size=40), min_size=1, max_size=4).filter(lambda ds: sum(map(len, ds)) > 0)


def what_followed(documents: Sequence[Sequence[int]], context: Sequence[int], vocab: int) -> tuple[dict, int]:
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


@settings(max_examples=40, deadline=None)
@given(documents, st.lists(few, min_size=1, max_size=20), st.lists(few, max_size=3))
def test_a_look_up_is_what_a_search_by_brute_force_finds(given_documents, text, below):
    asked = arguments(indexed(given_documents), [text], [below])
    for backend in ("reference", "auto"):
        tokens, log_probs, lengths = (t[0] for t in corpus_recall(*asked, vocab=3, backend=backend))
        assert (tokens[0] < 0).all() and lengths[0] == 0
        for node in range(len(below) + 1):
            try:
                probs, matched = what_followed(given_documents, [*text, *below[:node]], vocab=3)
            except AssertionError:
                continue
            row = zip(tokens[node + 1].tolist(), log_probs[node + 1].exp().tolist(), strict=True)
            assert lengths[node + 1] == matched
            assert {t: p for t, p in row if t >= 0} == pytest.approx(probs, rel=1e-5)


@backends("cpu", "reference")
def test_nothing_in_a_damaged_index_leads_outside_of_it(on):
    corpus = indexed(random_documents(3, 4, (300,)))
    gen = torch.Generator().manual_seed(0)
    for _ in range(10):
        order, following = (
            torch.randint(-(2**31), 2**31 - 1, like.shape, generator=gen).int()
            for like in (corpus.order, corpus.following)
        )
        damaged = SortedCorpus(corpus.text, order, following)
        tokens, log_probs, matched = corpus_recall(
            *arguments(damaged, [[1, 2, 3, 0, 1]], [[2, 3]]), vocab=4, backend=on.name
        )
        assert ((tokens >= -1) & (tokens < 4)).all() and not log_probs.isnan().any()
        assert ((matched >= 0) & (matched <= MAX_MATCH)).all()
