"""The Triton n-gram ops as opaque operators. Importing this imports no triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...compiled import empty_candidates, empty_log_probs, empty_lookup, no_result, schema_of
from ...graph import Rows, TokenGraph
from ..launching import launching_op
from . import reference
from .table import NgramTable


@launching_op(
    "gsd_kernels::triton_ngram_insert",
    mutates_args=("keys", "table_tokens", "table_log_probs"),
    schema=schema_of("ngram_insert"),
)
def _insert(*arguments: Any) -> None:
    from .triton_insert import ngram_insert as launch

    launch(*arguments)


_insert.register_fake(no_result)


@launching_op("gsd_kernels::triton_ngram_lookup", mutates_args=(), schema=schema_of("ngram_lookup"))
def _lookup(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    from .triton import ngram_lookup as launch

    return launch(*arguments)


_lookup.register_fake(empty_lookup)


def ngram_insert(table: NgramTable, contexts: Tensor, tokens: Tensor, log_probs: Tensor, valid: Tensor) -> None:
    """One launch, one program a sequence. The table's tensors must be dense, as NgramTable.empty makes them."""
    stored = (table.keys, table.tokens, table.log_probs)
    _insert(*stored, contexts, tokens, log_probs, valid, table.max_context, table.ways)


def ngram_lookup(table: NgramTable, contexts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One launch."""
    return _lookup(table.keys, table.tokens, table.log_probs, contexts, table.max_context, table.ways)


@launching_op("gsd_kernels::triton_perturb_candidates", mutates_args=(), schema=schema_of("perturb_candidates"))
def perturb_candidates(*arguments: Any) -> Tensor:
    """One launch."""
    from .triton import perturb_candidates as launch

    return launch(*arguments)


perturb_candidates.register_fake(empty_log_probs)


@launching_op("gsd_kernels::triton_mix_candidates", mutates_args=())
def _mix(
    tokens: Tensor, log_probs: Tensor, other_tokens: Tensor, other_log_probs: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    from .triton import mix_candidates as launch

    return launch(tokens, log_probs, other_tokens, other_log_probs, weight)


_mix.register_fake(empty_candidates)


def mix_candidates(
    tokens: Tensor,
    log_probs: Tensor,
    other_tokens: Tensor,
    other_log_probs: Tensor,
    weight: Tensor,
    index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One launch, and two where weights are looked up."""
    weight = reference.weights_of(weight, index, tokens.shape[:2])
    return _mix(tokens, log_probs, other_tokens, other_log_probs, weight)


def ngram_remember(table: NgramTable, rows: Rows, tail: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
    """The contexts by PyTorch, the insertion in one launch."""
    contexts = reference.row_contexts(rows, tail, table.max_context)
    ngram_insert(table, contexts, tokens, log_probs, reference.real_rows(rows))


def ngram_recall(
    table: NgramTable,
    graph: TokenGraph,
    nodes: Tensor,
    branch: int,
    first_pick: Tensor | None,
    seed: Tensor | None,
    sequence_ids: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Contexts and positions by PyTorch, the look-up and the noise in one launch each."""
    tokens, log_probs, matched = ngram_lookup(table, reference.node_contexts(graph, nodes))
    tokens, log_probs = tokens[..., :branch], log_probs[..., :branch]
    if first_pick is not None and seed is not None and sequence_ids is not None:
        positions = reference.pick_positions(graph, nodes, first_pick)
        log_probs = perturb_candidates(tokens, log_probs, positions, seed, sequence_ids)
    return tokens, torch.where(tokens >= 0, log_probs, float("-inf")), matched
