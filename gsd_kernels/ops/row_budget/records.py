"""What paying_rows knows of edges."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

FEATURES = 7
"""Of an edge: 1; the logit of its share, which is its probability over what the edges before it leave; whether it is
not its node's first; the product of both; whether its node is the root; the logarithm of the tokens that the step
before brought, if its node is the root; the same if it is not."""


class OddsBelief(NamedTuple):
    """A Gaussian belief about the weights of a logistic model, float64."""

    weights: Tensor  # [F], means
    covariance: Tensor  # [F, F]
    prior: Tensor  # [F], variances before anything was seen, which none exceeds
