"""The Triton flatten as an opaque operator. Importing this imports no triton."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...compiled import empty_rows, schema_of
from ...config import MAX_NODES
from ...graph import Rows, TokenGraph
from ..launching import launching_op

MAX_BRANCH = 32


@launching_op("gsd_kernels::triton_flatten", mutates_args=(), schema=schema_of("flatten"))
def _flatten(*arguments: Any) -> tuple[Tensor, ...]:
    from .triton import flatten as launch

    return launch(*arguments).tensors()


_flatten.register_fake(empty_rows)


def flatten(graph: TokenGraph, max_rows: int, max_path: int) -> Rows:
    """Best first in one launch. The graph's tensors must be dense, as TokenGraph.empty makes them."""
    if graph.capacity > MAX_NODES or graph.branch > MAX_BRANCH:  # what the sort key has bits for
        raise ValueError(f"graph: backend 'triton' takes up to {MAX_NODES} nodes and {MAX_BRANCH} edges of a node")
    return Rows(*_flatten(graph.token_ids, graph.edge_targets, graph.edge_log_probs, max_rows, max_path))
