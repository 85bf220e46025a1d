"""How many rows of a step are forwarded: the rule, what it learns, and that the text stays the same."""

from __future__ import annotations

import json
import math

import models
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gsd_kernels as gsd
from gsd_kernels import Rows
from gsd_kernels_hf.engine.session import Session
from gsd_kernels_hf.policy.budget import BINS, KINDS, OTHER, TEACHES, RowBudget, RowOdds
from gsd_kernels_hf.policy.rows import RowPolicy

LOG = math.log
ONES = [[1.0] * BINS] * KINDS
Tree = tuple[list[float], list[int]]


def rows_of(*trees: Tree) -> Rows:
    """Rows of which nothing is told but scores and parents."""
    scores, parents = (torch.tensor(list(part)) for part in zip(*trees, strict=True))
    empty = torch.empty(0)
    return Rows(empty, parents, empty, empty, empty, scores, empty)


def accepted(paths: list[list[int]], counts: list[int]) -> gsd.Acceptance:
    rows = torch.tensor(paths, dtype=torch.int32)
    return gsd.Acceptance(rows, torch.tensor(counts, dtype=torch.int32), torch.zeros(len(paths), dtype=torch.int32))


@st.composite
def trees(draw, size: int | None = None) -> Tree:
    """Scores and parents of rows, every parent before its children."""
    probs = draw(st.lists(st.floats(0, 1), min_size=size or 0, max_size=12 if size is None else size))
    scores, parents = [0.0], [-1]
    for prob in probs:
        parents.append(draw(st.integers(0, len(scores) - 1)))
        scores.append(scores[parents[-1]] + (LOG(prob) if prob > 0 else -math.inf))
    return scores, parents


@given(st.integers(0, 8).flatmap(lambda size: st.tuples(trees(size), trees(size))), st.data())
def test_the_rows_that_bring_most_a_second(pair, data):
    """Of all counts the one with the most tokens a second, the fewest of equals."""
    count = data.draw(st.integers(1, len(pair[0][0])))
    parts = data.draw(st.lists(st.floats(0, 1), min_size=count, max_size=count + 3))
    seconds = (0.1 + np.cumsum(parts)).tolist()
    budget = RowBudget(RowOdds())
    assert budget(rows_of(*pair), count) == count, "nothing is known of what rows cost"
    budget.seconds = seconds
    chosen = budget(rows_of(*pair), count)
    tokens = np.cumsum(np.mean([budget.odds.of(*tree) for tree in pair], 0) + TEACHES)
    rates = [tokens[n] / seconds[n] for n in range(count)]
    assert chosen == 1 + int(np.argmax(rates)) or rates[chosen - 1] == pytest.approx(max(rates))


def test_sure_rows_are_forwarded_and_poor_ones_are_not():
    budget = RowBudget(RowOdds())
    budget.seconds = [1.0, 1.2, 1.4, 1.6]
    sure = [0.0, LOG(0.9), LOG(0.8), -math.inf], [-1, 0, 1, -1]
    poor = [0.0, LOG(0.02), LOG(0.01), LOG(0.01)], [-1, 0, 0, 0]
    assert budget(rows_of(sure), 3) == 3 and budget(rows_of(poor), 4) == 1
    assert budget(rows_of(sure, poor), 4) == 3, "what the sequences promise together counts"
    budget.seconds = [1.0, 1.0, 1.0, 1.0]
    assert budget(rows_of(poor), 4) == 4, "they teach, at least"


@given(trees(), st.lists(st.tuples(trees(), st.integers(0, 12)), max_size=12))
def test_odds_are_probabilities_that_fall_along_paths(tree, steps):
    """And siblings' odds are together no more than their parent's.

    Whatever was learned; also of what was read from a disk, which is the same.
    """
    odds = RowOdds()
    for (scores, parents), last in steps:
        row, path = min(last, len(scores) - 1), []
        while row >= 0:
            path.insert(0, row)
            row = parents[row]
        odds.observe(scores, parents, path)
    found = odds.of(*tree)
    assert found[0] == 1.0 and all(p >= 0.0 for p in found)
    for parent, some in enumerate(found):
        assert sum(p for p, of in zip(found, tree[1], strict=True) if of == parent) <= some + 1e-12
    again = RowOdds()
    again.load(json.loads(json.dumps(odds.as_dict())))
    assert again.of(*tree) == pytest.approx(found)


def test_siblings_share_what_their_parent_has():
    third = LOG(1 / 3)
    found = RowOdds().of([0.0, third, third, third], [-1, 0, 0, 0])
    assert sum(found[1:]) == pytest.approx(1.0)


def test_odds_are_learned_of_rows_whose_parent_was_accepted():
    """Of forwarded ones, by sequence, not of finished ones, and not twice."""
    odds = RowOdds()
    budget = RowBudget(odds)
    tree = [0.0, LOG(0.3), LOG(0.3), LOG(0.09), LOG(0.09)], [-1, 0, 0, 1, 2]
    budget(rows_of(tree, tree), 4)
    budget.observe(accepted([[0, 1, -1], [-1, -1, -1]], [2, 0]))  # row 3 was refused; of row 4 nothing is known
    first, second = odds.of(*tree)[1], odds.of(*tree)[3] / odds.of(*tree)[1]
    assert first != pytest.approx(0.3) and second < 0.3
    before = odds.as_dict()
    budget.observe(accepted([[0, 1, -1], [-1, -1, -1]], [2, 0]))
    assert odds.as_dict() == before
    for _ in range(200):
        budget(rows_of(tree), 3)
        budget.observe(accepted([[0, 2, -1]], [2]))
    found = odds.of(*tree)
    assert found[1] < 0.1 and found[2] > 0.9, "the second one of two"
    assert found[3] / found[1] == pytest.approx(second), "nothing was forwarded behind them"


def test_siblings_behind_the_right_one_teach_nothing():
    odds, tree = RowOdds(), ([0.0, LOG(0.5), LOG(0.3)], [-1, 0, 0])
    odds.observe(*tree, [0, 1])
    assert odds.ratios[OTHER] == [1.0] * BINS and odds.ratios[0] != [1.0] * BINS
    odds.observe(*tree, [0, 2])
    assert odds.ratios[OTHER] != [1.0] * BINS


@pytest.mark.parametrize(
    "damage",
    [
        {},
        {"accepted": [1.0], "expected": [1.0]},
        {"accepted": ONES[:1], "expected": ONES},
        *({"accepted": [[count] * BINS] * KINDS, "expected": ONES} for count in (0.0, math.nan, math.inf)),
    ],
)
def test_odds_that_are_none_change_nothing(damage):
    odds = RowOdds()
    with pytest.raises((ValueError, KeyError, TypeError)):
        odds.load(damage)
    assert odds.as_dict() == RowOdds().as_dict()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampled", [False, True])
def test_fewer_rows_and_the_same_text(monkeypatch, batch, sampled):
    """Whatever the budget says: rows of these models are nearly free, so it is made to say something."""
    target = models.tiny()
    call, asked, learned = RowBudget.__call__, [], []

    def fewer(self, rows, count):
        assert all(parent < place for tree in rows.parent_rows.tolist() for place, parent in enumerate(tree))
        asked.append(max(1, min(count, 1 + len(asked) % 7)))
        self.seconds = [1.0] * asked[-1]  # no more than that
        return call(self, rows, asked[-1])

    monkeypatch.setattr(RowBudget, "__call__", fewer)
    monkeypatch.setattr(RowOdds, "observe", lambda self, scores, parents, path: learned.append((len(scores), path)))
    monkeypatch.setattr(RowPolicy, "_choose", lambda self: None)  # it would turn speculation off
    inputs = models.prompts(batch, 20, seed=1)
    options = {"max_new_tokens": 60, "eos_token_id": None}
    options |= {"do_sample": True, "seed": 3, "temperature": 0.5, "top_k": 20} if sampled else {}
    plain = gsd.generate(target, **inputs, **options)
    out = gsd.generate(target, **inputs, **options, draft_sources=("history",), return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    # Every step of an unfinished sequence tells which of its rows were accepted.
    assert len(learned) == out.stats.sequence_steps and any(len(path) > 1 for _, path in learned)
    assert out.stats.target_rows <= batch * sum(asked)
    assert all(path[0] == 0 and max(path) < rows for rows, path in learned)


def test_tokens_that_were_drawn_are_all_verified(monkeypatch):
    """Which of them are verified must not depend on what was drawn: the sample would not be exact."""
    asked = []
    budget = RowBudget(RowOdds())
    monkeypatch.setattr(RowBudget, "__call__", lambda self, rows, count: asked.append(count) or 1)
    target = models.tiny()
    options = {"assistant_model": models.noised(target, 0.1), "do_sample": True, "max_new_tokens": 24}
    use = Session.use
    monkeypatch.setattr(Session, "use", lambda self, config, acceptance, _: use(self, config, acceptance, budget))
    gsd.generate(target, **models.prompts(1, 8), **options, criterion="speculative")
    assert not asked
    gsd.generate(target, **models.prompts(1, 8), **options)
    assert asked
