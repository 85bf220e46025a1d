"""The Triton flatten as an opaque operator. Importing this imports no triton."""

from __future__ import annotations

from torch import Tensor

from ...config import MAX_NODES
from ...graph import Rows, TokenGraph, num_words
from ..launching import launching_op

MAX_BRANCH = 32


@launching_op(
    "gsd_kernels::triton_flatten",
    mutates_args=(),
    schema=(
        "(Tensor token_ids, Tensor edge_targets, Tensor edge_log_probs, int max_rows, int max_path)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _flatten(
    token_ids: Tensor, edge_targets: Tensor, edge_log_probs: Tensor, max_rows: int, max_path: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from .triton import flatten as launch

    return launch(token_ids, edge_targets, edge_log_probs, max_rows, max_path).tensors()  # type: ignore[return-value]


@_flatten.register_fake
def _(
    token_ids: Tensor, edge_targets: Tensor, edge_log_probs: Tensor, max_rows: int, max_path: int
) -> tuple[Tensor, ...]:
    shape = (token_ids.shape[0], max_rows)
    return (
        token_ids.new_empty(shape),
        token_ids.new_empty(shape),
        token_ids.new_empty(shape),
        token_ids.new_empty(*shape, num_words(max_rows)),
        token_ids.new_empty(shape),
        edge_log_probs.new_empty(shape),
        token_ids.new_empty(shape[0]),
    )


def flatten(graph: TokenGraph, max_rows: int, max_path: int) -> Rows:
    """Best first in one launch. The graph's tensors must be dense, as TokenGraph.empty makes them."""
    if graph.capacity > MAX_NODES or graph.branch > MAX_BRANCH:  # what the sort key has bits for
        raise ValueError(f"graph: backend 'triton' takes up to {MAX_NODES} nodes and {MAX_BRANCH} edges of a node")
    return Rows(*_flatten(graph.token_ids, graph.edge_targets, graph.edge_log_probs, max_rows, max_path))
