"""Weights of draft sources on every backend: the reference's tables, and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from ops.contracts.backends import backends
from ops.contracts.learn import COUNTS, check_learning, mixture, questions

from gsd_kernels.ops.learn import Asked, Mixture, learn_source
from gsd_kernels.ops.learn.api import MAX_LEVELS

pytestmark = pytest.mark.quick


@backends("cpu", "cuda")
def test_tables_equal_the_reference(on):
    learned = [check_learning(seed, on, batch=1 + seed % 4, branch=1 + seed % 5) for seed in range(8)]
    assert sum(learned) > 5


@backends("cpu", "cuda")
def test_more_levels_than_the_compiled_op_takes(on):
    assert check_learning(0, on, levels=MAX_LEVELS + 3)


@backends("reference", "cpu", "cuda")
def test_a_pick_that_both_had_is_shared_by_their_probabilities(on):
    start = torch.tensor([0.5])
    weights = on.to(Mixture(start, torch.tensor([4.0]), torch.tensor([8.0]), start.clone()))
    level = on.to(
        [
            torch.tensor([[3, 5]], dtype=torch.int32),
            torch.tensor([[[9, 8], [9, 8]]], dtype=torch.int32),
            torch.tensor([[[0.6, 0.2], [0.5, 0.1]]]).log(),
            None,
            torch.tensor([[[8, 9], [1, 2]]], dtype=torch.int32),
            torch.tensor([[[0.7, 0.2], [0.5, 0.1]]]).log(),
        ]
    )
    nodes, picked = on.to([torch.tensor([[3, 7, -2]], dtype=torch.int32), torch.tensor([[9, 9, 0]], dtype=torch.int32)])
    learn_source([Asked(*level)], nodes, picked, weights, 8.0, math.inf, backend=on.name)
    assert weights.counts.item() == 9.0 and weights.shares.item() == pytest.approx(4.0 + 0.6 / 0.8)
    assert weights.weights.item() == pytest.approx((4.0 + 0.75) / 9)


def test_triton_has_none_and_takes_what_auto_does():
    asked, nodes, picked = questions(0)
    learn_source(asked, nodes, picked, mixture(0), **COUNTS, backend="triton")


def test_no_level_is_refused():
    with pytest.raises(ValueError, match="asked: expected at least one level"):
        learn_source([], *questions(0)[1:], mixture(0), **COUNTS)
