"""csrc/algorithms/select_rows.h, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ...graph import Rows, TokenGraph
from .records import LogisticPosterior


def select_rows(
    graph: TokenGraph,
    num_accepted: Tensor,
    posterior: LogisticPosterior,
    seconds: Tensor | None,
    max_rows: int,
    max_path: int,
    row_bonus: float,
) -> Rows:
    return Rows(
        *torch.ops.gsd_kernels.select_rows(
            graph.token_ids,
            graph.depths,
            graph.edge_targets,
            graph.edge_log_probs,
            num_accepted,
            posterior.weights,
            seconds,
            row_bonus,
            max_rows,
            max_path,
        )
    )


def update_edge_model(
    graph: TokenGraph,
    num_accepted: Tensor,
    nodes: Tensor,
    picked: Tensor,
    posterior: LogisticPosterior,
    process_noise: float,
) -> LogisticPosterior:
    weights, covariance = torch.ops.gsd_kernels.update_edge_model(
        graph.token_ids,
        graph.depths,
        graph.edge_targets,
        graph.edge_log_probs,
        num_accepted,
        nodes.contiguous(),
        picked.contiguous(),
        *posterior,
        process_noise,
    )
    return LogisticPosterior(weights, covariance, posterior.prior)
