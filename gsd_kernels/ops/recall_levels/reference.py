from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...config import GraphConfig
from ...graph import TokenGraph
from ..history import Recollection, history_recall
from ..merge import merge
from .records import RecalledLevels


def recall_levels(
    known: Recollection,
    graph: TokenGraph,
    frontier: Tensor,
    config: GraphConfig,
    level: int,
    first_pick: Tensor | None = None,
    seed: Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> RecalledLevels:
    """Grow ``graph``, in place, by levels that the history alone drafts.

    At each level: :func:`~gsd_kernels.ops.history.history_recall` after every frontier node, then
    :func:`~gsd_kernels.merge`. One call, since a level's look-ups take microseconds where its calls, or on a GPU its
    launches, take longer.

    Args:
        known: of at least the graph's branch.
        graph: the graphs so far.
        frontier: int32 [B, F], F ≤ W, ids of the nodes to expand first, −1 for padding.
        config: of the step. Its levels from ``level`` on, at least one, are drafted, ``history_width`` nodes W each,
            and merged by its rules. After a level that leaves nothing to expand the others find nothing.
        level: number of the first level.
        first_pick, seed, sequence_ids: as ``history_recall`` takes them, all or none.
        backend: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"reference"``, see :mod:`gsd_kernels.backends`.

    Returns:
        Of every level's nodes what is known.
    """
    width = config.history_width
    nodes = pad(frontier, (0, width - frontier.shape[1]), value=-1)  # [B, W]
    found = []
    for number in range(level, config.depth + config.history_depth):
        noise = {"first_pick": first_pick, "seed": seed, "sequence_ids": sequence_ids}
        tokens, log_probs, matched = history_recall(known, graph, nodes, **noise, backend="reference")
        absent = nodes < 0
        tokens = torch.where(absent[..., None], -1, tokens)
        log_probs = torch.where(absent[..., None], -torch.inf, log_probs)
        matched = torch.where(absent, 0, matched)
        found.append(RecalledLevels(nodes, tokens, log_probs, matched))
        nodes = merge(
            graph,
            nodes,
            tokens,
            log_probs,
            level=number,
            width=width,
            config=config,
            backend="reference",
        ).node_ids
    return RecalledLevels(*(torch.cat(parts, 1) for parts in zip(*found, strict=True)))
