from __future__ import annotations

import torch
from torch import Tensor

from ...backends import implementations_of, resolve
from ...checks import check_tensor
from ...config import MAX_CONTEXT
from ...graph import TokenGraph
from ..history import Recollection
from ..history.api import check_recall
from ..ngram.api import check_noise
from . import compiled, reference
from .records import RecalledLevels

IMPLEMENTATIONS = implementations_of("recall_levels", cpu=compiled, reference=reference)


def recall_levels(
    known: Recollection,
    graph: TokenGraph,
    frontier: Tensor,
    log_ratio: Tensor | None = None,
    *,
    level: int,
    levels: int,
    width: int,
    merge_context: int,
    log_sibling_ratio: float = float("-inf"),
    log_min_prob: float = float("-inf"),
    first_pick: Tensor | None = None,
    seed: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    backend: str = "auto",
) -> RecalledLevels:
    """Grow ``graph``, in place, by levels that the history alone drafts.

    At each level: :func:`~gsd_kernels.ops.history.history_recall` after every frontier node,
    :func:`~gsd_kernels.ops.ngram.calibrate_candidates` by what it says was matched, :func:`~gsd_kernels.merge`. One
    call, since a level's look-ups take microseconds where its calls take a hundred of them. A GPU has no kernel for it:
    there a step is captured, and its calls cost no host time.

    Args:
        known: of at least the graph's branch.
        graph: the graphs so far.
        frontier: int32 [B, F], F ≤ width, ids of the nodes to expand first, −1 for padding.
        log_ratio: float32 [entries, K or more], calibration by what was matched and by rank;
            ``None``: as they are.
        level: number of the first level.
        levels: how many, at least 1. After one that leaves nothing to expand the others find nothing.
        width: most nodes W of each level.
        merge_context, log_sibling_ratio, log_min_prob: as :func:`~gsd_kernels.merge` takes them.
        first_pick, seed, sequence_ids: as ``history_recall`` takes them, all or none.
        backend: ``"auto"``, ``"cpu"`` or ``"reference"``, see :mod:`gsd_kernels.backends`.

    Returns:
        Of every level's nodes what is known.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    check_recall(known, graph)
    device, batch = known.table.keys.device, known.table.keys.shape[0]
    check_tensor("frontier", frontier, (batch, None), (torch.int32,), device)
    if not 1 <= frontier.shape[1] <= width or level < 0 or levels < 1:
        raise ValueError(
            "frontier, width, level, levels: expected 1 … width nodes, a level of at least 0 and at least 1 more, got "
            f"{frontier.shape[1]} nodes, {width}, {level} and {levels}"
        )
    if log_ratio is not None:
        check_tensor("log_ratio", log_ratio, (None, None), (torch.float32,), device)
        if log_ratio.shape[0] < 1 or log_ratio.shape[1] < graph.branch:
            raise ValueError(f"log_ratio: expected [1 or more, {graph.branch} or more], got {list(log_ratio.shape)}")
    if not -1 <= merge_context <= MAX_CONTEXT:
        raise ValueError(f"merge_context: expected -1 … {MAX_CONTEXT}, got {merge_context}")
    check_noise(first_pick, seed, sequence_ids, batch, device)
    return resolve(backend, device, IMPLEMENTATIONS)(
        known,
        graph,
        frontier,
        log_ratio,
        level=level,
        levels=levels,
        width=width,
        merge_context=merge_context,
        log_sibling_ratio=log_sibling_ratio,
        log_min_prob=log_min_prob,
        first_pick=first_pick,
        seed=seed,
        sequence_ids=sequence_ids,
    )
