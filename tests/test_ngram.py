"""The n-gram table: equal to a dictionary with least-recently-used replacement, sequence by sequence; mixing."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ngrams import MEMORIES, Memory, check_memory, check_mix, check_perturbed, contents, two_sources

import gsd_kernels as gsd
from gsd_kernels.backends import unavailable_reason

MISSING = unavailable_reason("cpu", torch.device("cpu"))
COMPILED = pytest.param("cpu", marks=pytest.mark.skipif(MISSING is not None, reason=f"compiled CPU ops: {MISSING}"))
BACKENDS = ["reference", COMPILED]


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
        batch=draw(st.integers(1, 2)),
        seed=draw(st.integers(0, 10**6)),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=80, deadline=None)
@given(memories())
def test_every_set_holds_what_was_inserted_last_in_order(backend, case):
    table = case.empty()
    expected = [oracle.NgramTable(case.capacity, case.ways, case.max_context) for _ in range(case.batch)]
    for contexts, tokens, log_probs, valid in case.calls():
        gsd.ngram_insert(table, contexts, tokens, log_probs, valid, backend=backend)
        for b, memory in enumerate(expected):
            for m in range(contexts.shape[1]):
                if valid[b, m]:
                    memory.insert(contexts[b, m].tolist(), (tokens[b, m].tolist(), log_probs[b, m].tolist()))
    free = (0, [-1] * case.branch, [0.0] * case.branch)
    for b, memory in enumerate(expected):
        got = list(zip(*(t[b].tolist() for t in (table.keys, table.tokens, table.log_probs)), strict=True))
        for s, entries in enumerate(memory.sets):
            listed = [(oracle.context_key(context), *entry) for context, entry in reversed(entries.items())]
            listed += [free] * (case.ways - len(listed))
            assert got[s * case.ways : (s + 1) * case.ways] == listed

    queries = case.queries()
    before = [t.clone() for t in contents(table)]
    tokens, log_probs, matched = gsd.ngram_lookup(table, queries, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(contents(table), before, strict=True)), "a look-up is no use"
    for b, memory in enumerate(expected):
        for w in range(queries.shape[1]):
            entry, length = memory.lookup(queries[b, w].tolist())
            assert matched[b, w] == length
            nothing = ([-1] * case.branch, [-math.inf] * case.branch)
            assert (tokens[b, w].tolist(), log_probs[b, w].tolist()) == (entry or nothing)


@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.skipif(MISSING is not None, reason=f"compiled CPU ops: {MISSING}")
def test_the_compiled_table_is_bit_equal(name):
    check_memory(MEMORIES[name], "cpu", "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_least_recently_inserted_goes_and_an_insertion_refreshes(backend):
    """Hand-drawn: one set of four ways, contexts of one token."""
    table = gsd.NgramTable.empty(1, 1, "cpu", capacity=4, max_context=1, ways=4)

    def insert(*pairs):
        contexts, tokens = (torch.tensor([[[p[i]] for p in pairs]], dtype=torch.int32) for i in (0, 1))
        valid = torch.ones(1, len(pairs), dtype=torch.bool)
        gsd.ngram_insert(table, contexts, tokens, torch.zeros(tokens.shape), valid, backend=backend)

    insert((1, 10), (2, 20), (3, 30), (4, 40))
    assert table.tokens.flatten().tolist() == [40, 30, 20, 10]
    insert((2, 21))
    assert table.tokens.flatten().tolist() == [21, 40, 30, 10]
    insert((5, 50), (6, 60), (5, 51))  # 1 and 3 go
    assert table.tokens.flatten().tolist() == [51, 60, 21, 40]
    insert(*((n, n) for n in range(20)), (7, 70))  # more than the set holds, 4 among them and gone again
    assert table.tokens.flatten().tolist() == [70, 19, 18, 17]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_call_is_many_and_sequences_are_independent(backend):
    case = Memory(rows=(90,), batch=3, max_context=4)
    whole, parts, alone = case.empty(), case.empty(), case.empty()
    (call,) = case.calls()
    gsd.ngram_insert(whole, *call, backend=backend)
    for begin in range(0, 90, 7):
        gsd.ngram_insert(parts, *(t[:, begin : begin + 7] for t in call), backend=backend)
    for b in range(3):
        one = gsd.NgramTable(*(t[b : b + 1] for t in (alone.keys, alone.tokens, alone.log_probs)), 4, case.ways)
        gsd.ngram_insert(one, *(t[b : b + 1] for t in call), backend=backend)
        answers = gsd.ngram_lookup(one, case.queries()[b : b + 1], backend=backend)
        for got, expected in zip(answers, gsd.ngram_lookup(whole, case.queries(), backend=backend), strict=True):
            assert torch.equal(got[0], expected[b])
    for other in (parts, alone):
        assert all(torch.equal(a, b) for a, b in zip(contents(other), contents(whole), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_invalid_or_no_text_leaves_the_table_alone(backend):
    case = Memory()
    table = case.empty()
    contexts, tokens, log_probs, valid = case.calls()[0]
    gsd.ngram_insert(table, contexts, tokens, log_probs, torch.zeros_like(valid), backend=backend)
    gsd.ngram_insert(table, torch.full_like(contexts, -1), tokens, log_probs, ~valid | valid, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(contents(table), contents(case.empty()), strict=True))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"capacity": 100}, "capacity: expected a power of two of at least ways=8, got 100"),
        ({"capacity": 4}, "capacity: .*got 4"),
        ({"ways": 3}, "ways: expected a power of two from 1 to 16, got 3"),
        ({"ways": 32}, "ways: .*got 32"),
        ({"max_context": 9}, "max_context: expected 1 … 8, got 9"),
    ],
)
def test_tables_that_cannot_be_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        gsd.NgramTable.empty(1, 3, "cpu", **arguments)


def test_short_contexts_are_refused():
    table, short = gsd.NgramTable.empty(1, 3, "cpu"), torch.zeros(1, 5, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="contexts: expected at least max_context=4 tokens of each, got 3; pad"):
        gsd.ngram_lookup(table, short)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_candidates_are_those_of_the_interpolated_distribution(seed, backend):
    tokens, log_probs, others, other_log_probs, weight = two_sources(seed, 4, 3)
    mixed, mixed_log_probs = gsd.mix_candidates(tokens, log_probs, others, other_log_probs, weight, backend=backend)
    for b in range(2):
        for row in range(5):
            probs: dict[int, float] = {}
            w = float(weight[b, row])
            for ids, lps, share in ((tokens, log_probs, 1 - w), (others, other_log_probs, w)):
                for token, lp in zip(ids[b, row].tolist(), lps[b, row].tolist(), strict=True):
                    if token >= 0 and share > 0:
                        probs[token] = probs.get(token, 0.0) + share * math.exp(lp)
            best = sorted(probs.values(), reverse=True)[:4]
            got = list(zip(mixed[b, row].tolist(), mixed_log_probs[b, row].tolist(), strict=True))
            assert [lp == float("-inf") for t, lp in got if t < 0] == [True] * (4 - len(best))
            assert [math.exp(lp) for t, lp in got if t >= 0] == pytest.approx(best, abs=1e-6)
            assert all(math.exp(lp) == pytest.approx(probs[t], abs=1e-6) for t, lp in got if t >= 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_perturbed_candidates_of_a_whole_vocabulary_are_the_drafts(backend):
    logits, positions = torch.randn(2, 3, 5), torch.tensor([[4, 5, 6], [4, 9, 1]], dtype=torch.int32)
    keys = {"seed": torch.tensor(11), "sequence_ids": torch.arange(2, dtype=torch.int32), "backend": backend}
    tokens, expected = gsd.draft_candidates(logits, positions, branch=5, temperature=1.0, **keys)
    log_probs = logits.log_softmax(-1).gather(-1, tokens.long())
    found = gsd.perturb_candidates(tokens, log_probs, positions, **keys)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("branch", [1, 4, 5, 32])
@pytest.mark.skipif(MISSING is not None, reason=f"compiled CPU ops: {MISSING}")
def test_compiled_noise_equals_the_reference(branch):
    for seed in range(4):
        check_perturbed(seed, branch, "cpu", "cpu")


@pytest.mark.parametrize(("branch", "others"), [(4, 4), (1, 1), (3, 7), (32, 32)])
@pytest.mark.skipif(MISSING is not None, reason=f"compiled CPU ops: {MISSING}")
def test_compiled_mixing_equals_the_reference(branch, others):
    assert sum(check_mix(seed, branch, others, "cpu", "cpu") for seed in range(4)) <= 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_comes_first_and_ties_keep_their_order(backend):
    tokens = torch.tensor([[[5, 6, 7]]], dtype=torch.int32)
    log_probs = torch.tensor([[[-1.0, math.nan, -1.0]]])
    others = torch.tensor([[[8]]], dtype=torch.int32), torch.tensor([[[-1.0]]])
    mixed, _ = gsd.mix_candidates(tokens, log_probs, *others, torch.tensor([[0.5]]), backend=backend)
    assert mixed.tolist() == [[[6, 5, 7]]]
