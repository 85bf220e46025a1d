"""How many of a step's rows are worth their time, and which those are.

A step takes ``seconds(n)`` with n rows and brings ``tokens(n)``; the best n has the most tokens a second. What decoding
brings in the long run would be the price of time (the renewal-reward theorem's) if steps had nothing to do with one
another. But where a text is easy, the next step finds it easy too: what is left to it is cheap, so sure rows are worth
less than their tokens; and more where it is hard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gsd_kernels import GraphConfig, Rows, TokenGraph
from gsd_kernels.ops.row_budget import FEATURES, OddsBelief, learn_edge_odds, paying_rows

from ..records import Verified

# Of the demo's target with the history alone, on five kinds of text: means and standard deviations of the weights, see
# gsd_kernels.ops.row_budget.FEATURES.
WEIGHTS = (0.9, 0.5, -1.4, -0.3, -0.9, 0.7, 0.33)
SPREADS = (0.25, 0.1, 0.25, 0.1, 0.2, 0.15, 0.1)
DRIFT = 2.5e-5  # by which share of their variance they wander with every edge seen
MOST = 100.0  # of a weight
TEACHES = 0.03  # tokens of later steps that a forwarded row brings: the history learns what follows it


class EdgeOdds:
    """How often an edge is right if the node before it is; see :func:`~gsd_kernels.ops.row_budget.paying_rows`.

    What a pair's generations learn, together; nothing of it is specific to a text.
    """

    def __init__(self) -> None:
        prior = torch.tensor(SPREADS, dtype=torch.float64) ** 2
        self.belief = OddsBelief(torch.tensor(WEIGHTS, dtype=torch.float64), prior.diag(), prior)

    def as_dict(self) -> dict[str, Any]:
        """All of it, for the disk."""
        return {"weights": self.belief.weights.tolist(), "covariance": self.belief.covariance.tolist()}

    def load(self, data: Mapping[str, Any]) -> None:
        """What :meth:`as_dict` gave.

        Raises:
            ValueError, KeyError, TypeError: it is not that; nothing was taken over.
        """
        weights, covariance = (torch.tensor(data[name], dtype=torch.float64) for name in ("weights", "covariance"))
        if weights.shape != (FEATURES,) or covariance.shape != (FEATURES, FEATURES):
            raise ValueError("edge odds: another number of weights")
        # Comparisons with NaN are false.
        variances = covariance.diagonal()
        most = 2 * self.belief.prior
        if not ((weights.abs() <= MOST).all() and (variances >= 0).all() and (variances <= most).all()):
            raise ValueError("edge odds: weights that none has")
        if not torch.equal(covariance, covariance.T) or torch.linalg.eigvalsh(covariance)[0] < -1e-9:
            raise ValueError("edge odds: not a covariance")
        self.belief = self.belief._replace(weights=weights, covariance=covariance)


class RowBudget:
    """Chooses the rows of a step that are forwarded, where the host may.

    Args:
        odds: of edges; learn from every step.

    Attributes:
        seconds: float64 [R], of a step with 1 … R rows of every sequence; R is the most that a step can have. ``None``:
            unknown, all rows are forwarded.
    """

    def __init__(self, odds: EdgeOdds) -> None:
        self.odds = odds
        self.seconds: Tensor | None = None
        self.num_accepted: Tensor | None = None  # int32 [B], in the step before

    def __call__(self, graph: TokenGraph, config: GraphConfig, remaining: int, backend: str = "auto") -> Rows:
        """The rows of a graph, on the host, that are worth forwarding.

        Args:
            graph: merged.
            config: the step's shape.
            remaining: tokens that may still be emitted, in the sequence with most: no row is deeper.
            backend: of the ops.
        """
        if self.num_accepted is None:
            self.num_accepted = torch.ones_like(graph.num_nodes)
        return paying_rows(
            graph,
            self.num_accepted,
            self.odds.belief,
            self.seconds,
            max_rows=config.max_rows,
            max_path=max(0, min(int(config.max_path or 0), remaining - 1)),
            teaches=TEACHES,
            backend=backend,
        )

    def observe(self, verified: Verified, backend: str = "auto") -> None:
        """Learn which edges of the last step were right."""
        before, self.num_accepted = self.num_accepted, verified.accepted.num_accepted
        if verified.graph is not None and before is not None:
            path = verified.nodes, verified.tokens
            self.odds.belief = learn_edge_odds(
                verified.graph, before, *path, self.odds.belief, drift=DRIFT, backend=backend
            )
