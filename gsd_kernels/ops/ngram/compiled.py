from __future__ import annotations

import torch
from torch import Tensor

from ...graph import Rows, TokenGraph
from .table import NgramTable


def ngram_insert(table: NgramTable, contexts: Tensor, tokens: Tensor, log_probs: Tensor, valid: Tensor) -> None:
    """csrc/algorithms/ngram.h, as the others here."""
    new = (t.contiguous() for t in (contexts, tokens, log_probs, valid))
    torch.ops.gsd_kernels.ngram_insert(table.keys, table.tokens, table.log_probs, *new, table.max_context, table.ways)


def ngram_lookup(table: NgramTable, contexts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.gsd_kernels.ngram_lookup(
        table.keys, table.tokens, table.log_probs, contexts.contiguous(), table.max_context, table.ways
    )


def ngram_remember(table: NgramTable, rows: Rows, tail: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
    tree = (rows.token_ids, rows.parent_rows, rows.depths, rows.num_rows, tail)
    new = (t.contiguous() for t in (*tree, tokens, log_probs))
    torch.ops.gsd_kernels.ngram_remember(table.keys, table.tokens, table.log_probs, *new, table.max_context, table.ways)


def ngram_recall(
    table: NgramTable, graph: TokenGraph, nodes: Tensor, branch: int, *noise: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    stored = (table.keys, table.tokens, table.log_probs)
    drafted = (graph.token_ids, graph.contexts, graph.depths, nodes.contiguous())
    return torch.ops.gsd_kernels.ngram_recall(*stored, *drafted, branch, table.max_context, table.ways, *noise)


def calibrate_candidates(log_probs: Tensor, log_ratio: Tensor, index: Tensor | None, edges: Tensor | None) -> Tensor:
    index = None if index is None else index.contiguous()
    return torch.ops.gsd_kernels.calibrate_candidates(log_probs.contiguous(), log_ratio, index, edges)


def perturb_candidates(
    tokens: Tensor, log_probs: Tensor, positions: Tensor, seed: Tensor, sequence_ids: Tensor
) -> Tensor:
    inputs = (t.contiguous() for t in (tokens, log_probs, positions, seed, sequence_ids))
    return torch.ops.gsd_kernels.perturb_candidates(*inputs)


def mix_candidates(
    tokens: Tensor,
    log_probs: Tensor,
    other_tokens: Tensor,
    other_log_probs: Tensor,
    weight: Tensor,
    index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    inputs = (t.contiguous() for t in (tokens, log_probs, other_tokens, other_log_probs, weight))
    return torch.ops.gsd_kernels.mix_candidates(*inputs, None if index is None else index.contiguous())
