"""What speculation did, for the log."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gsd_kernels import Rows, TokenGraph


@dataclass
class Statistics:
    """Sums since the start."""

    steps: int = 0
    requests: int = 0  # of all steps
    rows: int = 0  # that the target computed, padding included
    tokens: int = 0  # that requests were given; what lies behind a request's end is counted too
    nodes: int = 0
    merged: int = 0  # edges that joined an existing node
    accepted: int = 0  # drafted tokens
    accepted_merged: int = 0  # of them, those reached by a merge edge

    def add(self, rows: Rows, graph: TokenGraph, tokens: Tensor, counts: Tensor) -> None:
        """Count a step.

        Args:
            rows: R of each of B requests.
            graph: that they come from.
            tokens: int [B, R], what each request was given.
            counts: int [B], how many of them.
        """
        batch, width = rows.token_ids.shape
        self.steps += 1
        self.requests += batch
        self.rows += batch * width
        self.tokens += int(counts.sum())
        self.nodes += int(graph.num_nodes.sum()) - batch
        self.merged += int(graph.num_merges.sum())
        row, node = (torch.zeros(batch, 1, dtype=torch.int64, device="cpu") for _ in range(2))
        for place in range(int(counts.max()) - 1):
            child = (rows.parent_rows == row) & (rows.token_ids == tokens[:, place : place + 1])  # [B, R]
            taken = (counts[:, None] - 1 > place) & child.any(1, keepdim=True)
            row = child.int().argmax(1, keepdim=True)
            following = rows.node_ids.gather(1, row).long().clamp(min=0)
            merged = graph.parents.gather(1, following) != node
            self.accepted += int(taken.sum())
            self.accepted_merged += int((taken & merged).sum())
            node = following

    def line(self) -> str:
        """One line of the log."""
        return (
            f"GSD: steps={self.steps} tokens_per_step={ratio(self.tokens, self.requests)} "
            f"rows_per_request={ratio(self.rows, self.requests)} nodes={self.nodes} merged_edges={self.merged} "
            f"merged_share={ratio(self.merged, self.merged + self.nodes)} accepted={self.accepted} "
            f"accepted_merged={self.accepted_merged}"
        )


def ratio(part: int, whole: int) -> str:
    return f"{part / whole if whole else 0.0:.3f}"
