"""The sorted corpus against a search by brute force, and the compiled look-up against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ops.contracts.backends import backends
from ops.contracts.corpus import VOCAB, answers, arguments, contexts, expected, indexed, joined
from ops.contracts.ngram import poisoned

from gsd_kernels.ops.corpus import MAX_MATCH, SortedCorpus, corpus_recall, sort_corpus

pytestmark = pytest.mark.quick

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
        for node, context in enumerate(contexts([text], [below])[0], 1):
            try:
                probs, matched = expected(given_documents, context, vocab=3)
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
    with poisoned():
        ours = corpus_recall(*asked, vocab=VOCAB, backend=on.name)
    theirs = corpus_recall(*asked, vocab=VOCAB, backend="reference")
    for got, answer in zip((ours[0], ours[2]), (theirs[0], theirs[2]), strict=True):
        assert got.dtype == answer.dtype == torch.int32 and torch.equal(got, answer)
    torch.testing.assert_close(ours[1], theirs[1])
    assert (ours[1].diff(dim=-1).nan_to_num(0.0) <= 0).all(), "best first"


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
