"""The Triton merge as an opaque operator. Importing this imports no triton."""

from __future__ import annotations

from torch import Tensor

from ...graph import Frontier, TokenGraph
from ..launching import launching_op

_GRAPH = (
    "token_ids",
    "parents",
    "depths",
    "scores",
    "contexts",
    "expanded",
    "ancestor_mask",
    "edge_targets",
    "edge_log_probs",
    "num_nodes",
    "num_merges",
)


@launching_op(
    "gsd_kernels::triton_merge",
    mutates_args=_GRAPH,
    schema=(
        "("
        + ", ".join(f"Tensor(a{i}!) {name}" for i, name in enumerate(_GRAPH))
        + ", Tensor frontier, Tensor cand_tokens, Tensor cand_log_probs, int level, int width, int merge_context, "
        "float log_sibling_ratio, float log_min_prob) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _merge(
    token_ids: Tensor,
    parents: Tensor,
    depths: Tensor,
    scores: Tensor,
    contexts: Tensor,
    expanded: Tensor,
    ancestor_mask: Tensor,
    edge_targets: Tensor,
    edge_log_probs: Tensor,
    num_nodes: Tensor,
    num_merges: Tensor,
    frontier: Tensor,
    cand_tokens: Tensor,
    cand_log_probs: Tensor,
    level: int,
    width: int,
    merge_context: int,
    log_sibling_ratio: float,
    log_min_prob: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from .triton import merge as launch

    graph = TokenGraph(
        token_ids,
        parents,
        depths,
        scores,
        contexts,
        expanded,
        ancestor_mask,
        edge_targets,
        edge_log_probs,
        num_nodes,
        num_merges,
    )
    out = launch(
        graph, frontier, cand_tokens, cand_log_probs, level, width, merge_context, log_sibling_ratio, log_min_prob
    )
    return out.node_ids, out.token_ids, out.depths, out.ancestor_mask


@_merge.register_fake
def _(
    token_ids: Tensor,
    parents: Tensor,
    depths: Tensor,
    scores: Tensor,
    contexts: Tensor,
    expanded: Tensor,
    ancestor_mask: Tensor,
    edge_targets: Tensor,
    edge_log_probs: Tensor,
    num_nodes: Tensor,
    num_merges: Tensor,
    frontier: Tensor,
    cand_tokens: Tensor,
    cand_log_probs: Tensor,
    level: int,
    width: int,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = (token_ids.shape[0], width)
    ids = [token_ids.new_empty(shape) for _ in range(3)]
    return ids[0], ids[1], ids[2], token_ids.new_empty(*shape, ancestor_mask.shape[-1])


def merge(
    graph: TokenGraph,
    frontier: Tensor,
    cand_tokens: Tensor,
    cand_log_probs: Tensor,
    level: int,
    width: int,
    merge_context: int,
    log_sibling_ratio: float,
    log_min_prob: float,
) -> Frontier:
    """All candidates of the level in one launch. The graph's tensors must be dense, as TokenGraph.empty makes them."""
    return Frontier(
        *_merge(
            *graph.tensors(),
            frontier,
            cand_tokens,
            cand_log_probs,
            level,
            width,
            merge_context,
            log_sibling_ratio,
            log_min_prob,
        )
    )
