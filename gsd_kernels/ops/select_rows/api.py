"""On the CPU only, where the host decides how many rows a step has."""

from __future__ import annotations

from typing import Any

from ...graph import Rows, TokenGraph
from ..table import Op
from . import reference
from .records import FEATURES, LogisticPosterior

__all__ = ["FEATURES", "LogisticPosterior", "select_rows", "update_edge_model"]


def edges(graph: TokenGraph, *rest: Any) -> tuple[Any, ...]:
    """A graph as the operators take it."""
    return (graph.token_ids, graph.depths, graph.edge_targets, graph.edge_log_probs, *rest)


def updated(*arguments: Any) -> LogisticPosterior:
    """The operator's weights and covariance; the prior stays."""
    return LogisticPosterior(*update_edge_model.compiled(*arguments), arguments[4].prior)


select_rows = Op(
    "select_rows(Tensor token_ids, Tensor depths, Tensor edge_targets, Tensor edge_log_probs, Tensor num_accepted, "
    "Tensor weights, Tensor? seconds, float row_bonus, int max_rows, int max_path) -> (Tensor, Tensor, Tensor, "
    "Tensor, Tensor, Tensor, Tensor)",
    reference.select_rows,
    ranked=("cpu",),
    lacks=("triton",),
    flat=lambda graph, before, posterior, seconds, max_rows, max_path, row_bonus: edges(
        graph, before, posterior.weights, seconds, row_bonus, max_rows, max_path
    ),
    result=Rows,
)
update_edge_model = Op(
    "update_edge_model(Tensor token_ids, Tensor depths, Tensor edge_targets, Tensor edge_log_probs, "
    "Tensor num_accepted, Tensor nodes, Tensor picked, Tensor weights, Tensor covariance, Tensor prior, "
    "float process_noise) -> (Tensor, Tensor)",
    reference.update_edge_model,
    ranked=("cpu",),
    lacks=("triton",),
    own={"cpu": updated},
    tolerance=1e-9,
    flat=lambda graph, before, nodes, picked, posterior, noise: edges(graph, before, nodes, picked, *posterior, noise),
)
