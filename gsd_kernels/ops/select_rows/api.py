"""On the CPU only, where the host decides how many rows a step has."""

from __future__ import annotations

from typing import Any

from ...graph import Rows, TokenGraph
from ..table import ROWS, small_op
from . import reference
from .records import FEATURES, LogisticPosterior

EDGES = "token_ids[B,N] depths[B,N] edge_targets[B,N,K] edge_log_probs:float32[B,N,K] num_accepted[B]"
"""Of a line."""


def edges(graph: TokenGraph, *rest: Any) -> tuple[Any, ...]:
    """A graph as the operators take it."""
    return (graph.token_ids, graph.depths, graph.edge_targets, graph.edge_log_probs, *rest)


def updated(*arguments: Any) -> LogisticPosterior:
    """The operator's weights and covariance; the prior stays."""
    return LogisticPosterior(*update_edge_model.compiled(*arguments), arguments[4].prior)


select_rows = small_op(
    "select_rows",
    f"{EDGES} weights:float64[{FEATURES}] seconds?:float64[S] row_bonus:float=b max_rows:int=R max_path:int=D "
    f"-> {ROWS}",
    reference.select_rows,
    ranked=("cpu",),
    static=False,
    flat=lambda graph, before, posterior, seconds, max_rows, max_path, row_bonus: edges(
        graph, before, posterior.weights, seconds, row_bonus, max_rows, max_path
    ),
    result=Rows,
)
update_edge_model = small_op(
    "update_edge_model",
    f"{EDGES} nodes[B,P] picked[B,P] weights:float64[{FEATURES}] covariance:float64[{FEATURES},{FEATURES}] "
    f"prior:float64[{FEATURES}] process_noise:float=q -> float64[{FEATURES}] float64[{FEATURES},{FEATURES}]",
    reference.update_edge_model,
    ranked=("cpu",),
    own={"cpu": updated},
    tolerance=1e-9,
    flat=lambda graph, before, nodes, picked, posterior, noise: edges(graph, before, nodes, picked, *posterior, noise),
)
