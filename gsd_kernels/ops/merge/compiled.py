from __future__ import annotations

import torch
from torch import Tensor

from ...graph import Frontier, TokenGraph


def merge(
    graph: TokenGraph, frontier: Tensor, cand_tokens: Tensor, cand_log_probs: Tensor, *level: int | float
) -> Frontier:
    """csrc/algorithms/merge.h, on the CPU or the GPU; the numbers of a level as the reference takes them."""
    candidates = (t.contiguous() for t in (frontier, cand_tokens, cand_log_probs))
    return Frontier(*torch.ops.gsd_kernels.merge(graph.tensors(), *candidates, *level))
