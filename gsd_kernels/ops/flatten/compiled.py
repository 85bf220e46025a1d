from __future__ import annotations

import torch

from ...graph import Rows, TokenGraph


def flatten(graph: TokenGraph, max_rows: int, max_path: int) -> Rows:
    """csrc/algorithms/flatten.h, on the CPU or the GPU."""
    return Rows(
        *torch.ops.gsd_kernels.flatten(graph.token_ids, graph.edge_targets, graph.edge_log_probs, max_rows, max_path)
    )
