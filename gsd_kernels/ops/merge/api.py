from __future__ import annotations

from torch import Tensor

from ...config import MAX_CONTEXT, GraphConfig
from ...graph import Frontier, TokenGraph
from ..table import GRAPH, Op
from . import reference

RULES = "width:int=F merge_context:int=c log_sibling_ratio:float=r log_min_prob:float=p"
"""Of a line."""

MERGE = Op(
    "merge",
    f"{GRAPH} frontier[B,W] cand_tokens[B,W,K] cand_log_probs:float32[B,W,K] level:int=l {RULES} "
    "-> [B,F] [B,F] [B,F] [B,F,L]",
    reference.merge,
    flat=lambda graph, *level: (graph.tensors(), *level),
    result=Frontier,
)


def merge(
    graph: TokenGraph,
    frontier: Tensor,
    cand_tokens: Tensor,
    cand_log_probs: Tensor,
    *,
    level: int,
    width: int,
    config: GraphConfig | None = None,
    merge_context: int | None = None,
    log_sibling_ratio: float = float("-inf"),
    log_min_prob: float = float("-inf"),
    backend: str = "auto",
) -> Frontier:
    """Add one drafted level to ``graph``, in place, and choose the next frontier.

    A candidate that repeats a token sequence of the graph becomes an edge to the node that holds it; the others become
    nodes. Merge rule, order and tie-breaks: ``docs/how-it-works.md``; the idea: arXiv 2407.16207, section 3.2.

    Args:
        graph: the graphs so far.
        frontier: int32 [B, W], ids of the nodes just expanded, −1 padded.
        cand_tokens: int32 [B, W, K], candidate tokens after each of them; negative ids are ignored, and so is a token
            that an earlier candidate of the same node already has.
        cand_log_probs: float32 [B, W, K], their log-probabilities; −inf and NaN mean absent, and what is above 0
            counts as 0.
        level: 0 for the root's candidates, then 1, 2, …; names the draft-cache slots of the next frontier, which are
            ``level·width + i``.
        width: nodes in the next frontier.
        config: whose rules of merging hold, in place of the next three.
        merge_context: tokens of context that must agree, −1 for a tree.
        log_sibling_ratio: candidates below this plus their best sibling's log-probability are dropped.
        log_min_prob: nodes whose score is below this are never expanded.
        backend: see :mod:`gsd_kernels.backends`.

    Returns:
        The next :class:`~gsd_kernels.Frontier`: the ``width`` best unexpanded nodes by (score desc, id asc).

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range, or the graph is too small for the level.
    """
    if config is not None:
        merge_context, log_sibling_ratio = config.merge_context, config.log_sibling_ratio
        log_min_prob = config.log_min_prob
    if merge_context is None:
        raise TypeError("merge_context: expected a number of tokens, or a config; got neither")
    if not -1 <= merge_context <= MAX_CONTEXT:
        raise ValueError(f"merge_context: expected -1 … {MAX_CONTEXT}, got {merge_context}")
    if width < 1 or level < 0:
        raise ValueError(f"width, level: expected at least 1 and 0, got {width} and {level}")
    rules = merge_context, log_sibling_ratio, log_min_prob
    return MERGE.checked(graph, frontier, cand_tokens, cand_log_probs, level, width, *rules, backend=backend)
