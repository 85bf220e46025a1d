"""Unrolling, level by level: expand the surviving rows of one depth, keep the global best, go one deeper.

A child is never before its parent in the order (a log-probability above 0 counts as 0, and ties go to the shallower
row), so this equals a best-first heap exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...graph import Rows, pack_bits

NEG_INF = float("-inf")


def flatten(
    token_ids: Tensor,  # int32 [B, N]
    edge_targets: Tensor,  # int32 [B, N, K]
    edge_log_probs: Tensor,  # float32 [B, N, K]
    max_rows: int,
    max_path: int,
) -> Rows:
    batch, nodes, k = edge_targets.shape
    device = token_ids.device
    places = torch.arange(max_rows, device=device)  # [R]

    # The rows so far, in order; row 0 is the root and the others are free.
    node = torch.where(places == 0, 0, -1).expand(batch, -1)  # [B, R]
    score = torch.where(places == 0, 0.0, NEG_INF).expand(batch, -1)
    depth = torch.zeros_like(node)
    alone = torch.eye(max_rows, dtype=torch.bool, device=device)
    path = alone.expand(batch, -1, -1)  # [B, R, R]: rows on the path
    parent = torch.full_like(node, -1)
    for level in range(max_path):
        # Children of the rows at this depth, in (parent row, edge) order. They follow all the kept rows of smaller
        # depth, and kept rows are in order, so one stable sort by score puts everything in order.
        growing = (depth == level) & (node >= 0)
        at = node.clamp(min=0)[:, :, None].expand(-1, -1, k)  # [B, R, K]
        edges, log_probs = edge_targets.gather(1, at), edge_log_probs.gather(1, at)
        born = growing[:, :, None] & (edges >= 0) & (edges < nodes) & (log_probs > NEG_INF)
        child_score = torch.where(born, score[:, :, None] + log_probs.clamp(max=0.0) + 0.0, NEG_INF)
        all_scores = torch.cat([score, child_score.flatten(1)], 1)  # [B, R + R·K]
        score, order = all_scores.sort(dim=1, descending=True, stable=True)
        score, order = score[:, :max_rows], order[:, :max_rows]

        def take(kept: Tensor, children: Tensor, order: Tensor = order) -> Tensor:
            return torch.cat([kept, children.flatten(1)], 1).gather(1, order)

        is_child = order >= max_rows
        old_row = torch.where(is_child, (order - max_rows) // k, order)  # where the row, or its parent, stood
        position = _new_places(order, max_rows)  # [B, R]: old row → new row; parents of survivors survive
        node = torch.where(score > NEG_INF, take(node, edges), -1)
        depth = torch.where(is_child, level + 1, depth.gather(1, order.clamp(max=max_rows - 1)))
        parent = take(parent, places[:, None].expand(batch, -1, k).contiguous())
        parent = torch.where(parent >= 0, position.gather(1, parent.clamp(min=0)), -1)
        path = path.gather(1, old_row[:, :, None].expand(-1, -1, max_rows))  # columns: old rows
        columns = order.clamp(max=max_rows - 1)[:, None].expand(-1, max_rows, -1)
        path = (path.gather(2, columns) & ~is_child[:, None]) | alone

    real = node >= 0
    return Rows(
        token_ids=torch.where(real, token_ids.gather(1, node.clamp(min=0)), 0),
        parent_rows=torch.where(real, parent, -1).to(torch.int32),
        depths=torch.where(real, depth, 0).to(torch.int32),
        ancestor_mask=pack_bits(torch.where(real[:, :, None], path, alone)),
        node_ids=node.to(torch.int32),
        scores=score,
        num_rows=real.sum(1, dtype=torch.int32),
    )


def _new_places(order: Tensor, n: int) -> Tensor:
    """Where each of the first ``n`` old entries went, [B, n]; 0 for a dropped one."""
    old = torch.arange(n, device=order.device)
    found = order[:, None, :] == old[:, None]  # [B, old, new]
    return found.to(torch.int32).argmax(-1)
