from __future__ import annotations

import torch
from torch import Tensor

from .table import NgramTable


def ngram_insert(table: NgramTable, contexts: Tensor, tokens: Tensor, log_probs: Tensor, valid: Tensor) -> None:
    """csrc/algorithms/ngram.h, as the others here."""
    new = (t.contiguous() for t in (contexts, tokens, log_probs, valid))
    torch.ops.gsd_kernels.ngram_insert(table.keys, table.tokens, table.log_probs, *new, table.max_context, table.ways)


def ngram_lookup(table: NgramTable, contexts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.gsd_kernels.ngram_lookup(
        table.keys, table.tokens, table.log_probs, contexts.contiguous(), table.max_context, table.ways
    )


def perturb_candidates(
    tokens: Tensor, log_probs: Tensor, positions: Tensor, seed: Tensor, sequence_ids: Tensor
) -> Tensor:
    inputs = (t.contiguous() for t in (tokens, log_probs, positions, seed, sequence_ids))
    return torch.ops.gsd_kernels.perturb_candidates(*inputs)


def mix_candidates(
    tokens: Tensor, log_probs: Tensor, other_tokens: Tensor, other_log_probs: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    inputs = (t.contiguous() for t in (tokens, log_probs, other_tokens, other_log_probs, weight))
    return torch.ops.gsd_kernels.mix_candidates(*inputs)
