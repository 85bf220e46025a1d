"""Features of an edge, and the posterior of the logistic model over them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

FEATURES = 7
"""Of an edge: 1; the logit of its share, which is its claimed probability over what its better siblings leave; whether
it is not its node's first edge; the product of both; whether its node is the root; the logarithm of the tokens that the
step before emitted, if its node is the root; the same if it is not."""


class LogisticPosterior(NamedTuple):
    """Gaussian posterior of the weights of a logistic model, float64."""

    weights: Tensor  # [F], means
    covariance: Tensor  # [F, F]
    prior: Tensor  # [F], variances before any observation, which none exceeds
