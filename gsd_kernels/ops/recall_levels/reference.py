from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...graph import TokenGraph
from ..history import Recollection, history_recall
from ..merge import merge
from ..ngram import calibrate_candidates
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
    nodes = pad(frontier, (0, width - frontier.shape[1]), value=-1)  # [B, W]
    found = []
    for number in range(level, level + levels):
        noise = {"first_pick": first_pick, "seed": seed, "sequence_ids": sequence_ids}
        tokens, log_probs, matched = history_recall(known, graph, nodes, **noise, backend="reference")
        absent = nodes < 0
        tokens = torch.where(absent[..., None], -1, tokens)
        log_probs = torch.where(absent[..., None], -torch.inf, log_probs)
        matched = torch.where(absent, 0, matched)
        calibrated = log_probs
        if log_ratio is not None:
            calibrated = calibrate_candidates(log_probs, log_ratio, index=matched, backend="reference")
        found.append(RecalledLevels(nodes, tokens, log_probs, matched, calibrated))
        nodes = merge(
            graph,
            nodes,
            tokens,
            calibrated,
            level=number,
            width=width,
            merge_context=merge_context,
            log_sibling_ratio=log_sibling_ratio,
            log_min_prob=log_min_prob,
            backend="reference",
        ).node_ids
    return RecalledLevels(*(torch.cat(parts, 1) for parts in zip(*found, strict=True)))
