"""How many rows of a step are forwarded: the rule, who asks for it, and that the text stays the same."""

from __future__ import annotations

import math

import models
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated import BFLOAT16, USUAL, World, experience

import gsd_kernels as gsd
from gsd_kernels_hf.engine.session import Session
from gsd_kernels_hf.policy.acceptance import AcceptanceModel, GrowthPlan
from gsd_kernels_hf.policy.auto import AutoPolicy
from gsd_kernels_hf.policy.budget import BELIEF, PathOdds, Price, RowBudget
from gsd_kernels_hf.policy.ladder import ladder


@st.composite
def steps(draw):
    rows = draw(st.integers(1, 24))
    seconds = np.cumsum(draw(st.lists(st.floats(0, 1), min_size=rows, max_size=rows)))
    compared = draw(st.sets(st.integers(1, rows), max_size=6)) | {1}
    probs = sorted(draw(st.lists(st.floats(0, 1), min_size=rows - 1, max_size=rows - 1)), reverse=True)
    count = draw(st.integers(1, rows))
    return Price(seconds, sorted(compared)), np.cumsum([1.0, *probs]), count


@given(steps())
def test_one_step_and_many_choose_alike(step):
    price, tokens, count = step
    chosen = price.best(tokens[:count].tolist())
    assert price.best_of_each(tokens[None, None], np.array([[count]])).tolist() == [[chosen]]
    assert chosen in (*price.compared, count)
    net = {n: tokens[n - 1] - price.of_rows[n - 1] for n in (*price.compared, count) if n <= count}
    assert net[chosen] == max(net.values())


def test_sure_rows_are_forwarded_and_poor_ones_are_not():
    budget = RowBudget(PathOdds())
    sure = torch.tensor([[0.0, math.log(0.9), math.log(0.8), -torch.inf]])
    poor = torch.tensor([[0.0, math.log(0.02), math.log(0.01), math.log(0.01)]])
    assert not budget.asked
    assert budget(sure, 3) == 3 and budget.asked, "nothing is known of what rows cost"
    budget.price = Price(np.array([1.0, 1.2, 1.4, 1.6]), [1, 2, 4])
    assert budget(sure, 3) == 3 and budget(poor, 4) == 1
    assert budget(torch.cat([sure, poor]), 4) == 4, "what the sequences promise together counts"
    for _ in range(40):  # the sources are too modest
        budget.price = None
        assert budget(poor, 4) == 4
        budget.observe(accepted([[0, 1, 2, 3]], [4]))
    budget.price = Price(np.array([1.0, 1.2, 1.4, 1.6]), [1, 2, 4])
    assert budget(poor, 4) == 4


def accepted(rows: list[list[int]], counts: list[int]) -> gsd.Acceptance:
    paths = torch.tensor(rows, dtype=torch.int32)
    return gsd.Acceptance(paths, torch.tensor(counts, dtype=torch.int32), torch.zeros(len(rows), dtype=torch.int32))


def test_odds_are_learned_of_what_was_forwarded():
    """By sequence, not of finished ones, not of rows that were left out, and not twice."""
    odds = PathOdds()
    budget, before = RowBudget(odds), odds.of(math.log(0.3))
    assert 0.3 < before < 0.6, "paths are likelier than the product of their parts"
    step = torch.tensor([[0.0, math.log(0.3)], [0.0, math.log(0.3)]])
    budget(step, 2)
    budget.observe(accepted([[0, 1], [-1, -1]], [2, 0]))
    once = odds.of(math.log(0.3))
    assert once > before
    budget.observe(accepted([[0, 1], [-1, -1]], [2, 0]))
    assert odds.of(math.log(0.3)) == once
    budget(step, 1)
    budget.observe(accepted([[0, -1], [0, -1]], [1, 1]))
    assert odds.accepted[1] < 1 + BELIEF, "a step is forgotten slowly"
    for _ in range(200):
        budget(step, 2)
        budget.observe(accepted([[0, -1], [0, -1]], [1, 1]))
    assert odds.of(math.log(0.3)) < 0.1 and odds.of(math.log(0.9)) == PathOdds().of(math.log(0.9))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.lists(st.booleans(), min_size=40, max_size=40))
def test_odds_of_one_and_of_many_are_alike(probs, outcomes):
    odds = PathOdds()
    for place, outcome in enumerate(outcomes):
        odds.observe([-0.2 * place], [0] if outcome else [])
    known = PathOdds()
    known.load(odds.as_dict())
    one = [known.of(math.log(p)) if p > 0 else 0.0 for p in probs]
    assert all(0.0 <= p <= 1.0 for p in one)
    kept = [p > 1e-12 for p in probs]  # of less nothing is told
    assert np.allclose(odds.of_each(np.array(probs))[kept], np.array(one)[kept], atol=1e-6)


@pytest.mark.parametrize(
    "damage", [{}, {"accepted": [1.0], "expected": [1.0]}, {"accepted": [0.0] * 7, "expected": [1.0] * 7}]
)
def test_odds_that_are_none_change_nothing(damage):
    odds = PathOdds()
    with pytest.raises((ValueError, KeyError)):
        odds.load(damage)
    assert odds.as_dict() == PathOdds().as_dict()


def test_a_prediction_keeps_the_rows_that_the_budget_would():
    """With free rows all of them, with dear ones the root alone, which brings one token."""
    acceptance, plan = AcceptanceModel(4), GrowthPlan(list(ladder("cpu", with_model=True).values()), 4)
    every, rows = acceptance.tokens(plan)
    free = Price(np.zeros(16), range(1, 17))
    tokens, kept = acceptance.tokens(plan, free)
    assert np.allclose(kept, rows) and (tokens >= every - 1e-9).all()
    dear = Price(100.0 * np.arange(16), range(1, 17))
    assert np.array_equal(acceptance.tokens(plan, dear), np.ones((2, len(plan.shapes))))
    some = Price(0.05 * np.arange(16), range(1, 17))
    tokens, fewer = acceptance.tokens(plan, some)
    assert (tokens <= acceptance.tokens(plan, free)[0] + 1e-9).all() and (fewer < rows).any() and (fewer >= 1).all()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampled", [False, True])
def test_fewer_rows_and_the_same_text(monkeypatch, batch, sampled):
    """Whatever the budget says: rows of these models are nearly free, so it is made to say something."""
    target = models.tiny()
    call, asked, learned = RowBudget.__call__, [], []

    def fewer(self, scores, count):
        asked.append(max(1, call(self, scores, count) - len(asked) % 3))
        return asked[-1]

    monkeypatch.setattr(RowBudget, "__call__", fewer)
    monkeypatch.setattr(PathOdds, "observe", lambda self, scores, accepted: learned.append((len(scores), accepted)))
    monkeypatch.setattr(AutoPolicy, "_choose", lambda self: None)  # it would turn speculation off
    inputs = models.prompts(batch, 20, seed=1)
    options = {"max_new_tokens": 60, "eos_token_id": None}
    options |= {"do_sample": True, "seed": 3, "temperature": 0.5, "top_k": 20} if sampled else {}
    plain = gsd.generate(target, **inputs, **options)
    out = gsd.generate(target, **inputs, **options, draft_sources=("history",), return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    assert out.stats.target_rows == batch * sum(asked)
    # Every step of an unfinished sequence tells which of its rows were accepted.
    assert len(learned) == out.stats.sequence_steps and any(accepted for _, accepted in learned)
    assert all(0 <= row < 128 for _, accepted in learned for row in accepted)


def test_tokens_that_were_drawn_are_all_verified(monkeypatch):
    """Which of them are verified must not depend on what was drawn: the sample would not be exact."""
    asked = []
    budget = RowBudget(PathOdds())
    monkeypatch.setattr(RowBudget, "__call__", lambda self, scores, count: asked.append(count) or 1)
    target = models.tiny()
    options = {"assistant_model": models.noised(target, 0.1), "do_sample": True, "max_new_tokens": 24}
    use = Session.use
    monkeypatch.setattr(Session, "use", lambda self, config, acceptance, _: use(self, config, acceptance, budget))
    gsd.generate(target, **models.prompts(1, 8), **options, criterion="speculative")
    assert not asked
    gsd.generate(target, **models.prompts(1, 8), **options)
    assert asked


def test_beside_a_draft_model_all_rows_are_forwarded():
    assert AutoPolicy(experience()).budget is None
    assert AutoPolicy(experience(with_model=False)).budget is not None


def test_where_nobody_asks_shapes_are_predicted_whole(monkeypatch):
    """On a GPU shapes are static."""
    prices = []
    tokens = AcceptanceModel.tokens

    def noted(self, plan, price=None):
        prices.append(price)
        return tokens(self, plan, price)

    monkeypatch.setattr(AcceptanceModel, "tokens", noted)
    pair = experience(with_model=False)
    policy = AutoPolicy(pair, prefix=200)
    World(BFLOAT16, USUAL).run(policy, 40)
    assert len(prices) > 2 and set(prices) == {None} and policy.budget is not None and not policy.budget.asked
