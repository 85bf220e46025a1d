"""A choice of the rows of a step that are forwarded: those with the most expected tokens a second.

A step with n rows takes ``seconds(n)`` and emits ``tokens(n)`` in expectation; n maximises the quotient. By the
renewal-reward theorem the long-run throughput would be the price of a second, if steps were independent. They are not:
where a text is easy, the next step finds it easy too and needs little time for what is left, so likely rows are worth
less than their tokens; and more where it is hard.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gsd_kernels import GraphConfig, Rows, TokenGraph
from gsd_kernels.ops.select_rows import LogisticPosterior, select_rows, update_edge_model

from ..records import Verified

# Prior of the logistic weights, by feature, see gsd_kernels.ops.select_rows.FEATURES: between taking chances as they
# are, nearly right for the history's mixture (6,563 edges of SmolLM2), and what sources that claim too much need.
PRIOR_MEAN, PRIOR_STD = (0.5, 0.75, -1.2, -0.3, -0.4, 0.4, 0.1), (0.25, 0.1, 0.25, 0.1, 0.2, 0.15, 0.1)
PROCESS_NOISE = 2.5e-5  # share of its prior variance by which a weight's variance grows with every edge observed
EASY_TOKENS = 6.0  # of a step in an easy text
PRIOR_TOKENS, PRIOR_ROWS = 2.0, 8.0  # of a step before any was taken
PRIOR_STEPS, MEAN_STEPS = 4.0, 32.0  # that these count for, and steps of a running mean
ROW_BONUS = 0.03  # tokens of later steps that one more forwarded row is worth: the history learns what follows it


class EdgeModel:
    """Probability that an edge is right, given its node; see :func:`~gsd_kernels.ops.select_rows.select_rows`.

    What a pair's generations learn, together. In place of :class:`~gsd_kernels_hf.policy.acceptance.Acceptance` it
    knows how many tokens steps brought, too, whose rows were chosen by it.

    Attributes:
        means: tokens and rows of a step, and steps that these count for.
    """

    def __init__(self) -> None:
        self.means = np.array([PRIOR_TOKENS, PRIOR_ROWS, PRIOR_STEPS])
        mean, std = (torch.tensor(part, dtype=torch.float64, device="cpu") for part in (PRIOR_MEAN, PRIOR_STD))
        self.posterior = LogisticPosterior(mean, (std**2).diag(), std**2)

    def count_less(self) -> None:
        """Let the next steps count for more, as of another text."""
        self.means[2] = min(self.means[2], PRIOR_STEPS)

    def hope(self, part: float, *, lookups: bool) -> None:
        """Believe by ``part`` more that steps are easy, where none shows it."""
        self.means[0] += lookups * part * (EASY_TOKENS - self.means[0])

    def observe(self, shape: int, tokens: Sequence[int], rows: int) -> None:
        """Learn from a step of so many rows, which brought so many tokens by sequence."""
        self.means[2] = min(self.means[2] + 1.0, MEAN_STEPS)
        self.means[:2] += ([np.mean(tokens), rows] - self.means[:2]) / self.means[2]

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that a step brings, and the rows that it has, [1] each."""
        return self.means[:1], self.means[1:2]

    def arrays(self) -> dict[str, np.ndarray]:
        """All that is kept on disk, in place."""
        weights, covariance = (part.numpy() for part in (self.posterior.weights, self.posterior.covariance))
        return {"means": self.means, "weights": weights, "covariance": covariance}


class RowSelector:
    """Chooses the rows of a step that are forwarded, where the host may.

    Args:
        edges: predicts them; learns from every step.
        backend: of the ops.

    Attributes:
        seconds: float64 [R], of a step with 1 … R rows of every sequence; R is the most that a step can have. ``None``:
            unknown, all rows are forwarded.
    """

    def __init__(self, edges: EdgeModel, backend: str = "auto") -> None:
        self.edges, self.backend = edges, backend
        self.seconds: Tensor | None = None
        self.num_accepted: Tensor | None = None  # int32 [B], in the step before

    def __call__(self, graph: TokenGraph, config: GraphConfig, remaining: int) -> Rows:
        """The rows of a graph, on the host, that are forwarded.

        Args:
            graph: merged.
            config: the step's shape.
            remaining: tokens that may still be emitted, in the sequence with most: no row is deeper.
        """
        if self.num_accepted is None:
            self.num_accepted = torch.ones_like(graph.num_nodes)
        return select_rows(
            graph,
            self.num_accepted,
            self.edges.posterior,
            self.seconds,
            max_rows=config.max_rows,
            max_path=max(0, min(int(config.max_path or 0), remaining - 1)),
            row_bonus=ROW_BONUS,
            backend=self.backend,
        )

    def observe(self, verified: Verified) -> None:
        """Learn which edges of the last step were right."""
        before, self.num_accepted = self.num_accepted, verified.accepted.num_accepted
        if verified.graph is not None and before is not None:
            path, known = (verified.nodes, verified.tokens), self.edges.posterior
            self.edges.posterior = update_edge_model(
                verified.graph, before, *path, known, process_noise=PROCESS_NOISE, backend=self.backend
            )
