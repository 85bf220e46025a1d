from __future__ import annotations

import torch
from torch import Tensor

from ...graph import Frontier, TokenGraph


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
    """csrc/algorithms/merge.h, on the CPU or the GPU."""
    return Frontier(
        *torch.ops.gsd_kernels.merge(
            graph.tensors(),
            frontier.contiguous(),
            cand_tokens.contiguous(),
            cand_log_probs.contiguous(),
            level,
            width,
            merge_context,
            log_sibling_ratio,
            log_min_prob,
        )
    )
