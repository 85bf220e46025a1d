"""The race of policies: seconds come from a curve, the rule of SGLang moves as it should, and every text is whole."""

from __future__ import annotations

import numpy as np
import pytest

from gsd_kernels_bench.generation import policies_table as table
from gsd_kernels_bench.generation.ladder import CURVES
from gsd_kernels_hf.policy.base import Observation

CURVE = CURVES["CPU float32"]


def fed(rule: table.AverageRule, accepted: int, steps: int) -> int:
    """Draft levels of the rule after steps that all accept as much."""
    for _ in range(steps):
        rule.observe(Observation(None, [1 + accepted], 8, {}))
    return rule.shape().depth


def test_the_average_moves_between_four_shapes_with_hysteresis():
    rule = table.AverageRule()
    assert rule.shape().depth == 5 and fed(rule, 6, table.AverageRule.WARM_UP) == 5, "warm up"
    assert fed(rule, 7, 30) == 7
    assert fed(rule, 0, 5) in (3, 5) and fed(rule, 0, 30) == 1
    assert fed(rule, 2, 60) == 3
    assert [shape.depth for shape in rule.largest_shapes()] == [1, 3, 5, 7]


def test_a_race_needs_no_clock(monkeypatch):
    """Twice the same steps, whatever a clock says; tokens are counted whole."""
    from gsd_kernels_hf import demo

    monkeypatch.setattr(table, "NEW_TOKENS", 24)
    models, prompts = demo.load(), table.texts(1)["code"]
    taken = [table.race(models, "code, greedy", prompts, table.learners(CURVE)["auto"], CURVE) for _ in range(2)]
    assert taken[0] == taken[1] and sum(step.tokens for step in taken[0]) == 24
    rows = table.race(models, "code, greedy", prompts, table.learners(CURVE)["rows, 3 levels"], CURVE)
    assert sum(step.tokens for step in rows) == 24 and len({step.rows for step in rows}) > 1, "rows are chosen"
    assert 0 < table.rate(taken[0], CURVE) < 1e4


def test_parts_of_a_step_are_those_of_the_curve():
    shape = table.WIDE["rows, 3 levels"]
    target, other = CURVE.parts(shape, 12)
    assert target + other == pytest.approx(float(CURVE.seconds([shape], np.array([12.0]))[0]))
    assert CURVE.parts(None, 1)[0] == CURVE.target[1]
