from __future__ import annotations

import torch
from torch import Tensor

from ...graph import TokenGraph
from ..history import Recollection
from .records import RecalledLevels


def recall_levels(
    known: Recollection,
    graph: TokenGraph,
    frontier: Tensor,
    log_ratio: Tensor | None,
    *,
    level: int,
    levels: int,
    width: int,
    merge_context: int,
    log_sibling_ratio: float,
    log_min_prob: float,
    first_pick: Tensor | None,
    seed: Tensor | None,
    sequence_ids: Tensor | None,
) -> RecalledLevels:
    """csrc/cpu/recall_levels.cpp."""
    return RecalledLevels(
        *torch.ops.gsd_kernels.recall_levels(
            *(known.tensors(), graph.tensors(), frontier.contiguous(), log_ratio, known.sizes),
            *(level, levels, width, merge_context, log_sibling_ratio, log_min_prob),
            *(first_pick, seed, sequence_ids),
        )
    )
