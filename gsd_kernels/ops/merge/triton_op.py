"""The Triton merge as an opaque operator. Importing this imports no triton."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...compiled import empty_frontier, schema_of
from ...graph import Frontier, TokenGraph
from ..launching import launching_op


@launching_op("gsd_kernels::triton_merge", mutates_args=("graph",), schema=schema_of("merge"))
def _merge(graph: list[Tensor], *level: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from .triton import merge as launch

    out = launch(TokenGraph(*graph), *level)
    return out.node_ids, out.token_ids, out.depths, out.ancestor_mask


_merge.register_fake(empty_frontier)


def merge(
    graph: TokenGraph, frontier: Tensor, cand_tokens: Tensor, cand_log_probs: Tensor, *level: int | float
) -> Frontier:
    """All candidates of the level in one launch. The graph's tensors must be dense, as TokenGraph.empty makes them."""
    return Frontier(*_merge(graph.tensors(), frontier, cand_tokens, cand_log_probs, *level))
