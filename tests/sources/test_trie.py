"""Paths → what follows their beginnings: probabilities of paths that meet add up."""

from __future__ import annotations

import math

import pytest

from gsd_kernels_hf.sources.trie import Trie

PROBS = {1: 0.5, 2: 0.25, 3: 0.125, 4: 0.3, 5: 0.15}


def test_paths_that_meet_add_up():
    trie = Trie()
    trie.add([(7, 1), (8, 2)], PROBS)  # the draft's rows 1 → 2
    trie.add([(7, 1), (9, 3)], PROBS)  # 1 → 3
    trie.add([(7, 4), (8, 5)], PROBS)  # another way to spell the same
    best = trie.best()
    assert [token for _, token in best] == [7] and best[0][0] == pytest.approx(math.log(0.8))
    after = trie.after[7].best()
    assert [token for _, token in after] == [8, 9]
    assert [prob for prob, _ in after] == pytest.approx([math.log(0.4 / 0.8), math.log(0.125 / 0.8)])
    assert trie.after[7].after[8].best() == [], "nothing is behind the last token"


def test_a_token_within_one_of_the_drafts_is_certain():
    trie = Trie()
    trie.add([(7, 1), (8, 1), (9, 2)], PROBS)
    assert trie.after[7].best() == [(0.0, 8)]


def test_what_claims_more_than_there_is_counts_once():
    trie = Trie()
    trie.add([(7, 1)], {1: 0.9})
    trie.add([(7, 2)], {2: 0.8})
    trie.add([(5, 3)], {3: 0.0})
    assert trie.best() == [(0.0, 7)]


def test_equal_ones_come_by_their_ids():
    trie = Trie()
    for token, row in ((9, 1), (3, 2), (5, 3)):
        trie.add([(token, row)], {row: 0.25})
    assert [token for _, token in trie.best()] == [3, 5, 9]
