"""The n-gram table: equal to a dictionary with least-recently-used replacement, sequence by sequence; mixing."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.contracts.backends import backends, cases
from ops.contracts.ngram import (
    MEMORIES,
    Memory,
    check_captured_memory,
    check_memory,
    check_mix,
    check_perturbed,
    check_remembered_rows,
    contents,
    two_sources,
)

import gsd_kernels as gsd

pytestmark = pytest.mark.quick

EVERYWHERE = ("reference", "cpu", "interpreter", "triton", "cuda")
OTHERS = EVERYWHERE[1:]
SEEDS = {"cpu": range(4), "interpreter": range(3), "triton": range(10), "cuda": range(10)}
MANY = {
    f"many sequences {seed}": Memory(
        capacity=256, ways=8, max_context=4, vocab=6, rows=(300, 64, 64), batch=9, seed=seed
    )
    for seed in range(20)
}


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


@backends("reference", "cpu")
@settings(max_examples=80, deadline=None)
@given(memories())
def test_every_set_holds_what_was_inserted_last_in_order(on, case):
    table = case.empty()
    expected = [oracle.NgramTable(case.capacity, case.ways, case.max_context) for _ in range(case.batch)]
    for contexts, tokens, log_probs, valid in case.calls():
        gsd.ngram_insert(table, contexts, tokens, log_probs, valid, backend=on.name)
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
    tokens, log_probs, matched = gsd.ngram_lookup(table, queries, backend=on.name)
    assert all(torch.equal(a, b) for a, b in zip(contents(table), before, strict=True)), "a look-up is no use"
    for b, memory in enumerate(expected):
        for w in range(queries.shape[1]):
            entry, length = memory.lookup(queries[b, w].tolist())
            assert matched[b, w] == length
            nothing = ([-1] * case.branch, [-math.inf] * case.branch)
            assert (tokens[b, w].tolist(), log_probs[b, w].tolist()) == (entry or nothing)


@cases(
    "case",
    {
        **{name: MEMORIES.items() for name in ("cpu", "interpreter")},
        **{name: {**MEMORIES, **MANY}.items() for name in ("triton", "cuda")},
    },
)
def test_the_table_is_bit_equal(on, case):
    check_memory(case, on)


@backends("triton", "cuda")
def test_captured_insertions_and_lookups(on):
    check_captured_memory(on)


@backends("reference", "cpu")
def test_the_least_recently_inserted_goes_and_an_insertion_refreshes(on):
    """Hand-drawn: one set of four ways, contexts of one token."""
    table = gsd.NgramTable.empty(1, 1, "cpu", capacity=4, max_context=1, ways=4)

    def insert(*pairs):
        contexts, tokens = (torch.tensor([[[p[i]] for p in pairs]], dtype=torch.int32) for i in (0, 1))
        valid = torch.ones(1, len(pairs), dtype=torch.bool)
        gsd.ngram_insert(table, contexts, tokens, torch.zeros(tokens.shape), valid, backend=on.name)

    insert((1, 10), (2, 20), (3, 30), (4, 40))
    assert table.tokens.flatten().tolist() == [40, 30, 20, 10]
    insert((2, 21))
    assert table.tokens.flatten().tolist() == [21, 40, 30, 10]
    insert((5, 50), (6, 60), (5, 51))  # 1 and 3 go
    assert table.tokens.flatten().tolist() == [51, 60, 21, 40]
    insert(*((n, n) for n in range(20)), (7, 70))  # more than the set holds, 4 among them and gone again
    assert table.tokens.flatten().tolist() == [70, 19, 18, 17]


@backends("reference", "cpu")
def test_one_call_is_many_and_sequences_are_independent(on):
    case = Memory(rows=(90,), batch=3, max_context=4)
    whole, parts, alone = case.empty(), case.empty(), case.empty()
    (call,) = case.calls()
    gsd.ngram_insert(whole, *call, backend=on.name)
    for begin in range(0, 90, 7):
        gsd.ngram_insert(parts, *(t[:, begin : begin + 7] for t in call), backend=on.name)
    for b in range(3):
        one = gsd.NgramTable(*(t[b : b + 1] for t in (alone.keys, alone.tokens, alone.log_probs)), 4, case.ways)
        gsd.ngram_insert(one, *(t[b : b + 1] for t in call), backend=on.name)
        answers = gsd.ngram_lookup(one, case.queries()[b : b + 1], backend=on.name)
        for got, expected in zip(answers, gsd.ngram_lookup(whole, case.queries(), backend=on.name), strict=True):
            assert torch.equal(got[0], expected[b])
    for other in (parts, alone):
        assert all(torch.equal(a, b) for a, b in zip(contents(other), contents(whole), strict=True))


@backends("reference", "cpu")
def test_what_is_invalid_or_no_text_leaves_the_table_alone(on):
    case = Memory()
    table = case.empty()
    contexts, tokens, log_probs, valid = case.calls()[0]
    gsd.ngram_insert(table, contexts, tokens, log_probs, torch.zeros_like(valid), backend=on.name)
    gsd.ngram_insert(table, torch.full_like(contexts, -1), tokens, log_probs, ~valid | valid, backend=on.name)
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
@backends("reference", "cpu")
def test_mixed_candidates_are_those_of_the_interpolated_distribution(on, seed):
    tokens, log_probs, others, other_log_probs, weight = two_sources(seed, 4, 3)
    mixed, mixed_log_probs = gsd.mix_candidates(tokens, log_probs, others, other_log_probs, weight, backend=on.name)
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


@backends("reference", "cpu")
def test_perturbed_candidates_of_a_whole_vocabulary_are_the_drafts(on):
    logits, positions = torch.randn(2, 3, 5), torch.tensor([[4, 5, 6], [4, 9, 1]], dtype=torch.int32)
    keys = {"seed": torch.tensor(11), "sequence_ids": torch.arange(2, dtype=torch.int32), "backend": on.name}
    tokens, expected = gsd.draft_candidates(logits, positions, branch=5, temperature=1.0, **keys)
    log_probs = logits.log_softmax(-1).gather(-1, tokens.long())
    found = gsd.perturb_candidates(tokens, log_probs, positions, **keys)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("branch", [1, 4, 5, 32])
@backends(*OTHERS)
def test_perturbed_candidates_equal_the_reference(on, branch):
    for seed in SEEDS[on.id]:
        check_perturbed(seed, branch, on)


@pytest.mark.parametrize(("branch", "others"), [(4, 4), (1, 1), (3, 7), (32, 32)])
@backends(*OTHERS)
def test_mixed_candidates_equal_the_reference(on, branch, others):
    seeds = SEEDS[on.id]
    assert sum(check_mix(seed, branch, others, on) for seed in seeds) <= len(seeds)


@backends(*EVERYWHERE)
def test_nan_comes_first_and_ties_keep_their_order(on):
    tokens = torch.tensor([[[5, 6, 7]]], dtype=torch.int32)
    log_probs = torch.tensor([[[-1.0, math.nan, -1.0]]])
    others = torch.tensor([[[8]]], dtype=torch.int32), torch.tensor([[[-1.0]]])
    mixed, _ = gsd.mix_candidates(*on.to((tokens, log_probs, *others, torch.tensor([[0.5]]))), backend=on.name)
    assert mixed.tolist() == [[[6, 5, 7]]]


FEW = {name: MEMORIES[name] for name in ("usual", "single tokens", "long contexts")}


@cases(
    "case", {"cpu": MEMORIES.items(), "interpreter": FEW.items(), "triton": MEMORIES.items(), "cuda": MEMORIES.items()}
)
def test_rows_are_remembered_and_nodes_recalled(on, case):
    check_remembered_rows(case, on)


@backends("reference", "cpu", "cuda")
def test_one_weight_of_a_table_serves_all_rows_without_an_index(on):
    tokens, log_probs, others, other_log_probs, _ = on.to(two_sources(3, 4, 3))
    sources = (tokens, log_probs, others, other_log_probs)
    table = on.to(torch.tensor([0.3, 0.9]))
    got = gsd.mix_candidates(*sources, table, backend=on.name)
    expected = gsd.mix_candidates(*sources, torch.full_like(log_probs[..., 0], 0.3), backend=on.name)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_an_index_into_no_table_is_refused():
    with pytest.raises(ValueError, match="weight: expected a table with an index"):
        gsd.mix_candidates(*two_sources(0, 4, 3), index=torch.zeros(2, 5, dtype=torch.int32))
