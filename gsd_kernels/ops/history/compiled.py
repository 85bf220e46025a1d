"""csrc/algorithms/history.h, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ...graph import TokenGraph
from .records import Recollection


def history_recall(
    known: Recollection, graph: TokenGraph, nodes: Tensor, branch: int, *noise: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    drafted = (graph.token_ids, graph.parents, graph.contexts, graph.depths, nodes.contiguous())
    return torch.ops.gsd_kernels.history_recall(known.tensors(), *drafted, branch, known.sizes, *noise)


def history_append(known: Recollection, tokens: Tensor, counts: Tensor) -> None:
    index = (known.text, known.length, known.heads, known.previous)
    torch.ops.gsd_kernels.history_append(*index, tokens.contiguous(), counts.contiguous())
