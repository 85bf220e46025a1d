from __future__ import annotations

from ...config import MAX_ROWS
from ...graph import Rows, TokenGraph
from ..table import ROWS, Op
from . import reference

FLATTEN = Op(
    "flatten",
    f"token_ids[B,N] edge_targets[B,N,K] edge_log_probs:float32[B,N,K] max_rows:int=R max_path:int=D -> {ROWS}",
    reference.flatten,
    result=Rows,
)


def flatten(graph: TokenGraph, max_rows: int, max_path: int, *, backend: str = "auto") -> Rows:
    """Unroll ``graph`` to the best ``max_rows`` rows; each row has one parent row, hence one exact context.

    The rows are the first of the total order (path score desc, depth asc, parent row asc, edge index asc), where a
    path score is the float32 sum of edge log-probabilities from the root, of which one above 0 counts as 0: no row is
    before its parent. A node that is reached by k paths may appear
    in k rows; no two children of a row have the same token. Rows are numbered in that order, the root is row 0.

    Args:
        graph: the merged graphs.
        max_rows: rows to keep, the root included (1 … 128).
        max_path: deepest row (0 … max_rows − 1).

    Returns:
        :class:`~gsd_kernels.Rows` of static width ``max_rows``. A padding row sees itself only.

    Raises:
        ValueError: a budget is out of range.
    """
    if not 1 <= max_rows <= MAX_ROWS:
        raise ValueError(f"max_rows: expected 1 … {MAX_ROWS}, got {max_rows}")
    if not 0 <= max_path < max_rows:
        raise ValueError(f"max_path: expected 0 … max_rows - 1 = {max_rows - 1}, got {max_path}")
    edges = graph.token_ids, graph.edge_targets, graph.edge_log_probs
    return FLATTEN.checked(*edges, max_rows, max_path, backend=backend)
