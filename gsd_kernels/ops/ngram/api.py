from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...graph import Rows, TokenGraph
from ..table import small_op
from . import reference
from .table import NgramTable

TABLE = "keys:int64[B,C] table_tokens[B,C,T] table_log_probs:float32[B,C,T]"
"""Of a line."""


def stored(table: NgramTable, *rest: Any) -> tuple[Any, ...]:
    """The operators' arguments: a table's tensors, what is asked, and the table's sizes."""
    return (table.keys, table.tokens, table.log_probs, *rest, table.max_context, table.ways)


INSERT = small_op(
    "ngram_insert",
    "keys!:int64[B,C] table_tokens![B,C,T] table_log_probs!:float32[B,C,T] contexts[B,R,X] "
    "tokens[B,R,T] log_probs:float32[B,R,T] valid:bool[B,R] max_context:int=m ways:int=w",
    reference.ngram_insert,
    flat=stored,
)
LOOKUP = small_op(
    "ngram_lookup",
    f"{TABLE} contexts[B,R,X] max_context:int=m ways:int=w -> [B,R,T] float32[B,R,T] [B,R]",
    reference.ngram_lookup,
    flat=stored,
)
PERTURB = small_op(
    "perturb_candidates",
    "tokens[B,R,K] log_probs:float32[B,R,K] positions[B,R] seed:int64[] sequence_ids[B] -> float32[B,R,K]",
    reference.perturb_candidates,
    tolerance=2e-5,
)
MIX = small_op(
    "mix_candidates",
    "tokens[B,R,K] log_probs:float32[B,R,K] other_tokens[B,R,O] other_log_probs:float32[B,R,O] "
    "weight:float32[...] index?[B,R] -> [B,R,K] float32[B,R,K]",
    reference.mix_candidates,
    tolerance=1e-5,
)


def ngram_insert(
    table: NgramTable, contexts: Tensor, tokens: Tensor, log_probs: Tensor, valid: Tensor, *, backend: str = "auto"
) -> None:
    """Remember what follows each context, for all its lengths, in place.

    As if the entries were inserted one after the other, rows in order and the lengths of a row from 1 up: a key that is
    in its set is replaced, and becomes its newest; any other pushes out the set's oldest. So of equal contexts the last
    one stays, and of one call's entries the last ``ways`` distinct ones of a set.

    Args:
        table: the tables.
        contexts: int32 [B, M, C], C ≥ max_context, tokens before the continuation, nearest first, −1 where the text
            begins; a row is kept for the lengths before its first −1.
        tokens: int32 [B, M, K], continuations, best first, −1 for none.
        log_probs: float32 [B, M, K].
        valid: bool [B, M], rows to take.
        backend: see :mod:`gsd_kernels.backends`.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    table.check_contexts(contexts)
    INSERT.checked(table, contexts, tokens, log_probs, valid, backend=backend)


def ngram_lookup(table: NgramTable, contexts: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """Look up what followed each context, by the longest one known. The table stays as it is.

    Args:
        table: the tables.
        contexts: int32 [B, W, C], C ≥ max_context, nearest token first, −1 where the text begins.
        backend: see :mod:`gsd_kernels.backends`.

    Returns:
        tokens int32 [B, W, K] (−1 for none), log-probabilities float32 [B, W, K], and the length of the matched
        context int32 [B, W] (0 for none).

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    table.check_contexts(contexts)
    return LOOKUP.checked(table, contexts, backend=backend)


def perturb_candidates(
    tokens: Tensor,
    log_probs: Tensor,
    positions: Tensor,
    *,
    seed: Tensor,
    sequence_ids: Tensor,
    backend: str = "auto",
) -> Tensor:
    """Likely picks of the target, given the noise that it will use: log_softmax(log p + g) of a few tokens.

    As :func:`draft_candidates` for a whole vocabulary. All tokens that are not listed count as one with the
    probability that is left and the average noise.

    Args:
        tokens: int32 [B, W, K], distinct in a row, −1 for none.
        log_probs: float32 [B, W, K], −inf for none.
        positions: int32 [B, W], index of the token being picked, padding excluded.
        seed: int64 [].
        sequence_ids: int32 [B].
        backend: see :mod:`gsd_kernels.backends`.

    Returns:
        float32 [B, W, K], in the order of ``tokens``; −inf for none.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    return PERTURB.checked(tokens, log_probs, positions, seed, sequence_ids, backend=backend)


def mix_candidates(
    tokens: Tensor,
    log_probs: Tensor,
    other_tokens: Tensor,
    other_log_probs: Tensor,
    weight: Tensor,
    *,
    index: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The best candidates of two sources: P = (1 − weight) · P(first) + weight · P(other), a token of both once.

    Interpolation of a model with a cache of recent text, as in Kuhn and De Mori (1990, "A cache-based natural language
    model for speech recognition").

    Args:
        tokens: int32 [B, W, K], distinct in a row, −1 for none.
        log_probs: float32 [B, W, K].
        other_tokens, other_log_probs: [B, W, K'], as the first two.
        weight: float32 [B, W], 0 … 1, of the other source; or a table [n] of such weights.
        index: int32 [B, W], each row's entry of the table; ``None``: the first.
        backend: see :mod:`gsd_kernels.backends`.

    Returns:
        tokens int32 [B, W, K], best first, −1 for none, and log-probabilities float32 [B, W, K].

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    if isinstance(weight, Tensor) and weight.dim() != 1 and (index is not None or weight.shape != tokens.shape[:2]):
        raise ValueError(f"weight: expected a table with an index, or one for each row, got {list(weight.shape)}")
    return MIX.checked(tokens, log_probs, other_tokens, other_log_probs, weight, index, backend=backend)


def ngram_remember(
    table: NgramTable, rows: Rows, tail: Tensor, tokens: Tensor, log_probs: Tensor, *, backend: str = "auto"
) -> None:
    """:func:`ngram_insert` of what follows each row of an unrolled graph, padding left out; for the history where no
    compiled ops are.

    Args:
        table: the tables.
        rows: R of them; a row's context is its own token, those of the rows above it, and ``tail``.
        tail: int32 [B, C], the tokens before the root, nearest first, −1 where the text begins; C ≥ max_context.
        tokens: int32 [B, R, K], continuations, best first, −1 for none.
        log_probs: float32 [B, R, K].
        backend: see :mod:`gsd_kernels.backends`.
    """
    contexts = reference.row_contexts(rows, tail, table.max_context)
    INSERT(table, contexts, tokens, log_probs, reference.real_rows(rows), backend=backend)


def ngram_recall(
    table: NgramTable,
    graph: TokenGraph,
    nodes: Tensor,
    first_pick: Tensor | None = None,
    seed: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`ngram_lookup` of what followed nodes of a graph, as many continuations as its branch, with the noise that
    the target will use (:func:`perturb_candidates`) where a seed is given; for the history where no compiled ops are.

    Args:
        table: the tables, of at least the graph's branch.
        graph: with the tokens before each node.
        nodes: int32 [B, W], −1 for padding, which is looked up as the root.
        first_pick: int32 [B], index in the text of the token after the root, padding excluded; with a seed.
        seed: int64 [].
        sequence_ids: int32 [B]; with a seed.
        backend: see :mod:`gsd_kernels.backends`.

    Returns:
        tokens int32 [B, W, K] (−1 for none), log-probabilities float32 [B, W, K] (−∞ for none), and the length of the
        matched context int32 [B, W] (0 for none).
    """
    tokens, log_probs, matched = LOOKUP(table, reference.node_contexts(graph, nodes), backend=backend)
    tokens, log_probs = tokens[..., : graph.branch], log_probs[..., : graph.branch]
    if seed is not None:
        positions = reference.pick_positions(graph, nodes, first_pick)
        log_probs = PERTURB(tokens, log_probs, positions, seed, sequence_ids, backend=backend)
    return tokens, torch.where(tokens >= 0, log_probs, float("-inf")), matched
