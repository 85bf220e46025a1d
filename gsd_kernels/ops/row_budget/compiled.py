"""csrc/algorithms/row_budget.h, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ...graph import Rows, TokenGraph
from .records import OddsBelief


def paying_rows(
    graph: TokenGraph,
    num_accepted: Tensor,
    belief: OddsBelief,
    seconds: Tensor | None,
    max_rows: int,
    max_path: int,
    teaches: float,
) -> Rows:
    return Rows(
        *torch.ops.gsd_kernels.paying_rows(
            graph.token_ids,
            graph.depths,
            graph.edge_targets,
            graph.edge_log_probs,
            num_accepted,
            belief.weights,
            seconds,
            teaches,
            max_rows,
            max_path,
        )
    )


def learn_edge_odds(
    graph: TokenGraph, num_accepted: Tensor, nodes: Tensor, picked: Tensor, belief: OddsBelief, drift: float
) -> OddsBelief:
    weights, covariance = torch.ops.gsd_kernels.learn_edge_odds(
        graph.token_ids,
        graph.depths,
        graph.edge_targets,
        graph.edge_log_probs,
        num_accepted,
        nodes.contiguous(),
        picked.contiguous(),
        *belief,
        drift,
    )
    return OddsBelief(weights, covariance, belief.prior)
