"""What was said before: the n-gram table, candidates of two sources, the history's mixture, the sorted corpus."""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ops.contracts.backends import assert_bit_equal, backends, cases, check_equal, poisoned
from ops.contracts.ngram import (
    KNOWN,
    MEMORIES,
    VOCAB,
    Known,
    Memory,
    answers,
    arguments,
    changed,
    check_captured_memory,
    check_memory,
    check_mix,
    check_perturbed,
    check_remembered_rows,
    close_candidates,
    contents,
    contexts_of,
    indexed,
    joined,
    noise,
    tail_of,
    tree_of,
    two_sources,
    what_followed,
)

import gsd_kernels as gsd
from gsd_kernels.ops.corpus import MAX_MATCH, SortedCorpus, corpus_recall, sort_corpus
from gsd_kernels.ops.history import WEIGHTS, Recollection, Seen, history_append, history_recall
from gsd_kernels.ops.history import records as r

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


@backends("cuda")
def test_captured_insertions_and_lookups(on):
    check_captured_memory(on)


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


def test_an_index_into_no_table_is_refused():
    with pytest.raises(ValueError, match="weight: expected a table with an index"):
        gsd.mix_candidates(*two_sources(0, 4, 3), index=torch.zeros(2, 5, dtype=torch.int32))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", KNOWN)
@backends("cpu", "cuda")
def test_the_compiled_mixture_is_the_references(on, name, sampled):
    case = KNOWN[name]
    (known, text), (theirs, _) = case.build("reference" if on.device == "cuda" else on.name), case.build()
    assert_bit_equal(known.tensors(), theirs.tensors())
    known = on.to(known)
    graph = case.graph(text)
    nodes = torch.arange(-1, min(12, graph.capacity), dtype=torch.int32).repeat(case.batch, 1)
    draws = noise(case.batch) if sampled else {}
    with poisoned():
        got = history_recall(known, *on.to((graph, nodes)), **on.to(draws), backend=on.name)
    got = tuple(t.cpu() for t in got)
    expected = history_recall(theirs, graph, nodes, **draws, backend="reference")
    close_candidates(got, expected, 2e-5 if sampled else 1e-6)
    assert torch.equal(got[2], expected[2])
    if name == "nothing read":
        assert (got[2] == 0).all() and (got[0] < 0).all()
    elif case.text:
        assert (got[0] >= 0).any() and got[2].max() == r.COPIED
    total = torch.where(got[0] >= 0, got[1].double().exp(), 0.0).sum(-1)
    assert (total <= 1.0 + 1e-6).all()


def history_of(texts, **weights):
    """One sequence that has read texts, each apart from the last, with no weights but those named."""
    table = gsd.NgramTable.empty(1, 8, "cpu", capacity=64, max_context=4, ways=8)
    values = torch.zeros(WEIGHTS, dtype=torch.float64)
    for place, value in weights.items():
        values[int(place.removeprefix("w"))] = value
    known = Recollection.empty(table, values, room=200)
    for text in texts:
        tokens = torch.tensor([[-1, *text]], dtype=torch.int32)
        history_append(known, tokens, torch.tensor([len(text) + 1], dtype=torch.int32))
    return known


def graph_behind(text, drafted=()):
    """A graph of the root that a text ends with, and a path of drafted tokens."""
    graph = gsd.TokenGraph.empty(1, gsd.GraphConfig(depth=12, width=1, branch=4, max_rows=16), "cpu")
    tokens = torch.tensor([text], dtype=torch.int32)
    graph.reset(tokens[:, -1].contiguous(), tail_of(tokens))
    frontier = graph.root_frontier()
    for level, token in enumerate(drafted):
        candidates = torch.tensor([[[token, -1, -1, -1]]], dtype=torch.int32)
        chances = torch.tensor([[[-0.1, *[-torch.inf] * 3]]])
        frontier = gsd.merge(graph, frontier, candidates, chances, level=level, width=1, merge_context=-1).node_ids
    return graph


@pytest.mark.parametrize("length", [5, 9, 30, 60])
@pytest.mark.parametrize("drafted", [0, 1, 3])
@backends("cpu", "reference")
def test_a_match_has_no_longest_length_and_runs_on_through_the_draft(on, length, drafted):
    """Of two places that end alike the longer match wins, though the other is newer; drafted tokens count."""
    run = list(range(10, 10 + length))
    before = [*run, 7, 1, *run[-5:], 8, 2, *run]
    known = history_of([before[: len(before) - drafted]])
    graph = graph_behind(before[: len(before) - drafted], before[len(before) - drafted :])
    nodes = torch.tensor([[drafted]], dtype=torch.int32)
    tokens, log_probs, matched = history_recall(known, graph, nodes, backend=on.name)
    first = [8, 7] if length == 5 else [7, 8]  # of equal lengths the newest
    assert tokens[0, 0].tolist() == [*first, -1, -1] and matched.tolist() == [[r.COPIED]]
    assert log_probs[0, 0, :2].tolist() == pytest.approx([-1.0986] * 2, abs=1e-3)  # all scores are 0: a third each


@backends("cpu", "reference")
def test_no_match_goes_from_one_text_into_the_next(on):
    known = history_of([[3, 4], [5, 6, 7, 9], [3, 4, 5, 6, 7]])
    nodes = torch.zeros(1, 1, dtype=torch.int32)
    found = history_recall(known, graph_behind([3, 4, 5, 6, 7]), nodes, backend=on.name)
    assert found[2].tolist() == [[0]] and (found[0] < 0).all()


@pytest.mark.parametrize("drafted", [False, True])
def test_what_nearly_was_the_root_is_proposed_behind_it_alone(drafted):
    known = history_of([[3, 4]], **{f"w{(r.LISTS - 1) * r.LIST_FEATURES + 1}": 1.0})
    known.runners[0, :3] = torch.tensor([4, 6, 5], dtype=torch.int32)  # the root itself first
    known.runner_log_probs[0, :3] = torch.tensor([-0.1, -2.5, -3.0])
    graph = graph_behind([3, 4], [9] if drafted else [])
    tokens, log_probs, matched = history_recall(known, graph, torch.tensor([[int(drafted)]], dtype=torch.int32))
    if drafted:
        assert matched.tolist() == [[0]]
        return
    assert tokens[0, 0].tolist() == [6, 5, -1, -1] and matched.tolist() == [[r.ELSEWHERE]]
    assert (log_probs[0, 0, 0] - log_probs[0, 0, 1]).item() == pytest.approx(0.5, abs=1e-5)


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


@backends("cpu", "reference")
def test_of_each_sequence_as_many_tokens_are_appended_as_it_says(on):
    known = changed(KNOWN["nothing read"], batch=3).build()[0]
    known.clear()
    tokens = torch.arange(12, dtype=torch.int32).view(3, 4)
    history_append(known, tokens, torch.tensor([4, 0, 2], dtype=torch.int32), backend=on.name)
    assert known.length.tolist() == [4, 0, 2] and known.text[2, :2].tolist() == [8, 9]


def step_of(case, known, number):
    """A step's tokens, how many of them, and what the target found likely at its rows."""
    _, rows, tail = tree_of(Memory(batch=case.batch, vocab=case.vocab), number)
    gen = torch.Generator().manual_seed(number)
    shape = (*rows.token_ids.shape, known.table.tokens.shape[2])
    best = torch.randint(-1, case.vocab, shape, generator=gen).int()
    chances = torch.rand(shape, generator=gen).log()
    tokens = torch.randint(0, case.vocab, (case.batch, 6), generator=gen).int()
    accepted = torch.randint(-1, shape[1], (case.batch, 6), generator=gen).int()
    counts = torch.randint(0, 7, (case.batch,), generator=gen).int()
    return tokens, counts, Seen(rows, tail, accepted, best, chances)


@pytest.mark.parametrize("name", KNOWN)
@backends("cpu", "cuda")
def test_what_a_step_leaves_is_the_references(on, name):
    case = KNOWN[name]
    known, _ = case.build()
    for number in range(4):
        tokens, counts, seen = step_of(case, known, number)
        seen = None if number == 2 else seen  # nothing was drafted
        _, (known, *_) = check_equal(history_append, on, known, tokens, counts, seen)
    assert known.length.min() > case.text


@backends("cpu", "reference")
def test_a_sequence_that_emits_nothing_keeps_its_runners_up(on):
    known = KNOWN["usual"].build()[0]
    before = [t.clone() for t in known.tensors()[3:]]
    tokens, _, seen = step_of(KNOWN["usual"], known, 0)
    history_append(known, tokens, torch.zeros(2, dtype=torch.int32), seen, backend=on.name)
    assert_bit_equal(known.tensors()[3:], before)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"weights": torch.zeros(3, dtype=torch.float64)}, "weights: expected shape"),
        ({"weights": torch.zeros(WEIGHTS)}, "weights: expected float64"),
        ({"hashes": 12}, "hashes: expected a power of two, got 12"),
        ({"learned": gsd.NgramTable.empty(2, 4, "cpu")}, "learned.keys: expected shape"),
    ],
)
def test_a_history_of_other_sizes_is_refused(wrong, match):
    given = {"weights": torch.zeros(WEIGHTS, dtype=torch.float64)} | wrong
    with pytest.raises((TypeError, ValueError), match=match):
        Recollection.empty(gsd.NgramTable.empty(2, 4, "cpu"), **given)


few = st.integers(0, 3)
documents = st.lists(st.lists(few, max_size=40), min_size=1, max_size=4).filter(lambda ds: sum(map(len, ds)) > 0)


@settings(max_examples=60, deadline=None)
@given(documents)
@example([[3, *[0] * 14, 1], [2, *[0] * 14, 1]])  # alike in 14 tokens
def test_positions_are_sorted_by_their_contexts(given_documents):
    text = joined(given_documents)
    order, following = sort_corpus(text)

    def context(position):
        found = []
        while len(found) < MAX_MATCH and position >= 0 and text[position] >= 0:
            found.append(int(text[position]))
            position -= 1
        return found

    assert sorted(order.tolist()) == [p for p in range(len(text) - 1) if text[p] >= 0 and text[p + 1] >= 0]
    keys = [context(p) for p in order]
    assert keys == sorted(keys)
    assert following.tolist() == text[order + 1].tolist()


@settings(max_examples=60, deadline=None)
@given(documents, st.lists(few, min_size=1, max_size=20), st.lists(few, max_size=3))
def test_a_look_up_is_what_a_search_by_brute_force_finds(given_documents, text, below):
    corpus = indexed(given_documents)
    asked = arguments(corpus, [text], [below])
    for backend in ("reference", "auto"):
        found = corpus_recall(*asked, vocab=3, backend=backend)
        assert answers(found, 0, 0) == ({}, 0)
        for node, context in enumerate(contexts_of([text], [below])[0], 1):
            try:
                probs, matched = what_followed(given_documents, context, vocab=3)
            except AssertionError:
                continue
            got, length = answers(found, 0, node)
            assert length == matched
            assert got == pytest.approx(probs, rel=1e-5)


def random_documents(seed: int, vocab: int, sizes: tuple[int, ...]) -> list[list[int]]:
    gen = np.random.default_rng(seed)
    return [gen.integers(0, vocab, size).tolist() for size in sizes]


CORPORA = {
    "few tokens": (random_documents(0, 3, (500, 40)), 3),
    "many tokens": (random_documents(1, VOCAB, (2000,)), VOCAB),
    "one token repeated": ([[5] * 700], 6),
    "one pair": ([[1, 2]], 4),
    "no entry": ([[4]], 5),
}


@pytest.mark.parametrize("name", CORPORA)
@backends("cpu")
def test_compiled_and_reference_agree(on, name):
    given_documents, vocab = CORPORA[name]
    gen = np.random.default_rng(7)
    texts = [given_documents[0][-12:], gen.integers(0, vocab, 30).tolist(), [5]]
    asked = arguments(indexed(given_documents), texts, [[1, 2, 0], [0], []])
    (_, log_probs, _), _ = check_equal(corpus_recall, on, *asked, vocab=VOCAB, most=corpus_recall.tolerance)
    assert (log_probs.diff(dim=-1).nan_to_num(0.0) <= 0).all(), "best first"


@backends("cpu", "reference")
def test_nothing_in_a_damaged_index_leads_outside_of_it(on):
    corpus = indexed(random_documents(3, 4, (300,)))
    gen = torch.Generator().manual_seed(0)

    def noise(like):
        return torch.randint(-(2**31), 2**31 - 1, like.shape, generator=gen).int()

    for _ in range(10):
        damaged = SortedCorpus(corpus.text, noise(corpus.order), noise(corpus.following))
        tokens, log_probs, matched = corpus_recall(
            *arguments(damaged, [[1, 2, 3, 0, 1]], [[2, 3]]), vocab=4, backend=on.name
        )
        assert ((tokens >= -1) & (tokens < 4)).all() and not log_probs.isnan().any()
        assert ((matched >= 0) & (matched <= MAX_MATCH)).all()
