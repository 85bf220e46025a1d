from __future__ import annotations

import torch
from torch import Tensor

from ...backends import implementations_of, resolve, resolve_without_triton
from ...checks import check_tensor
from ...config import MAX_CONTEXT
from ...graph import Rows, TokenGraph
from . import compiled, reference, triton_op
from .table import NgramTable

INSERT, LOOKUP, PERTURB = (
    implementations_of(op, triton=triton_op, cpu=compiled, cuda=compiled, reference=reference)
    for op in ("ngram_insert", "ngram_lookup", "perturb_candidates")
)
# These three are one launch compiled; Triton's kernels stand behind PyTorch's operators, 191 launches a step more.
MIX, REMEMBER, RECALL = (
    implementations_of(op, cpu=compiled, cuda=compiled, triton=triton_op, reference=reference)
    for op in ("mix_candidates", "ngram_remember", "ngram_recall")
)
CALIBRATE = implementations_of("calibrate_candidates", cpu=compiled, cuda=compiled, reference=reference)


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
    device, (batch, m) = table.keys.device, contexts.shape[:2]
    check_tensor("tokens", tokens, (batch, m, table.tokens.shape[2]), (torch.int32,), device)
    check_tensor("log_probs", log_probs, (batch, m, table.tokens.shape[2]), (torch.float32,), device)
    check_tensor("valid", valid, (batch, m), (torch.bool,), device)
    resolve(backend, device, INSERT)(table, contexts, tokens, log_probs, valid)


def ngram_lookup(table: NgramTable, contexts: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """What followed each context, by the longest one known. The table stays as it is.

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
    return resolve(backend, table.keys.device, LOOKUP)(table, contexts)


def ngram_remember(
    table: NgramTable, rows: Rows, tail: Tensor, tokens: Tensor, log_probs: Tensor, *, backend: str = "auto"
) -> None:
    """:func:`ngram_insert` of what follows each row of an unrolled graph, padding left out.

    Args:
        table: the tables.
        rows: R of them; a row's context is its own token, those of the rows above it, and ``tail``.
        tail: int32 [B, C], the tokens before the root, nearest first, −1 where the text begins; C ≥ max_context.
        tokens: int32 [B, R, K], continuations, best first, −1 for none.
        log_probs: float32 [B, R, K].
        backend: see :mod:`gsd_kernels.backends`.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    device, (batch, r) = table.keys.device, rows.token_ids.shape
    table.check_contexts(tail[:, None])
    check_tensor("rows.parent_rows", rows.parent_rows, (batch, r), (torch.int32,), device)
    check_tensor("tokens", tokens, (batch, r, table.tokens.shape[2]), (torch.int32,), device)
    check_tensor("log_probs", log_probs, (batch, r, table.tokens.shape[2]), (torch.float32,), device)
    resolve(backend, device, REMEMBER)(table, rows, tail, tokens, log_probs)


def ngram_recall(
    table: NgramTable,
    graph: TokenGraph,
    nodes: Tensor,
    *,
    first_pick: Tensor | None = None,
    seed: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`ngram_lookup` of what followed nodes of a graph, as many continuations as its branch, with the noise that
    the target will use (:func:`perturb_candidates`) where a seed is given.

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

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    device, batch = table.keys.device, table.keys.shape[0]
    check_tensor("nodes", nodes, (batch, None), (torch.int32,), device)
    check_tensor("graph.contexts", graph.contexts, (batch, None, MAX_CONTEXT), (torch.int32,), device)
    if graph.branch > table.tokens.shape[2]:
        raise ValueError(f"graph: expected a branch of at most {table.tokens.shape[2]}, got {graph.branch}")
    check_noise(first_pick, seed, sequence_ids, batch, device)
    function = resolve(backend, device, RECALL)
    return function(table, graph, nodes, graph.branch, first_pick, seed, sequence_ids)


def check_noise(
    first_pick: Tensor | None, seed: Tensor | None, sequence_ids: Tensor | None, batch: int, device: torch.device
) -> None:
    """Raise unless what :func:`ngram_recall` draws noise by is what its docstring says."""
    if len({first_pick is None, seed is None, sequence_ids is None}) > 1:
        raise ValueError("first_pick, seed, sequence_ids: expected all or none")
    if seed is not None:
        check_tensor("first_pick", first_pick, (batch,), (torch.int32,), device)
        check_tensor("seed", seed, (), (torch.int64,), device)
        check_tensor("sequence_ids", sequence_ids, (batch,), (torch.int32,), device)


def calibrate_candidates(
    log_probs: Tensor,
    log_ratio: Tensor,
    *,
    index: Tensor | None = None,
    edges: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Log-probabilities corrected by how often such candidates were right, at most 0.

    A table by an index of the row and by the candidate's rank, or by its rank and the bin of its probability. There is
    no Triton kernel: ``backend="triton"`` takes what ``"auto"`` does.

    Args:
        log_probs: float32 [B, W, K], best first.
        log_ratio: float32 [entries, K or more]; with ``edges`` [K or more, bins].
        index: int32 [B, W], entry of each row; ``None``: 0.
        edges: float32 [bins − 1], ascending, between bins of probability. Not with ``index``.
        backend: see :mod:`gsd_kernels.backends`.

    Returns:
        float32 [B, W, K].

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    device = log_probs.device
    check_tensor("log_probs", log_probs, (None, None, None), (torch.float32,), device)
    check_tensor("log_ratio", log_ratio, (None, None), (torch.float32,), device)
    if index is not None:
        check_tensor("index", index, tuple(log_probs.shape[:2]), (torch.int32,), device)
    if edges is not None:
        check_tensor("edges", edges, (log_ratio.shape[1] - 1,), (torch.float32,), device)
    if log_probs.shape[2] > log_ratio.shape[1 if edges is None else 0]:
        raise ValueError(f"log_ratio: expected at least {log_probs.shape[2]} ranks, got {list(log_ratio.shape)}")
    if index is not None and edges is not None:
        raise ValueError("index, edges: expected at most one of them")
    function = resolve_without_triton(backend, device, CALIBRATE)
    return function(log_probs, log_ratio, index, edges)


def perturb_candidates(
    tokens: Tensor,
    log_probs: Tensor,
    positions: Tensor,
    *,
    seed: Tensor,
    sequence_ids: Tensor,
    backend: str = "auto",
) -> Tensor:
    """What the target is likely to pick, given the noise that it will use: log_softmax(log p + g) of a few tokens.

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
    device, shape = tokens.device, tuple(tokens.shape)
    check_tensor("tokens", tokens, (None, None, None), (torch.int32,), device)
    check_tensor("log_probs", log_probs, shape, (torch.float32,), device)
    check_tensor("positions", positions, shape[:2], (torch.int32,), device)
    check_tensor("seed", seed, (), (torch.int64,), device)
    check_tensor("sequence_ids", sequence_ids, shape[:1], (torch.int32,), device)
    return resolve(backend, device, PERTURB)(tokens, log_probs, positions, seed, sequence_ids)


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
    device, shape = tokens.device, tuple(tokens.shape)
    check_tensor("tokens", tokens, (None, None, None), (torch.int32,), device)
    check_tensor("log_probs", log_probs, shape, (torch.float32,), device)
    check_tensor("other_tokens", other_tokens, (*shape[:2], None), (torch.int32,), device)
    check_tensor("other_log_probs", other_log_probs, tuple(other_tokens.shape), (torch.float32,), device)
    table = isinstance(weight, Tensor) and weight.dim() == 1
    check_tensor("weight", weight, (None,) if table else shape[:2], (torch.float32,), device)
    if index is not None:
        check_tensor("index", index, shape[:2], (torch.int32,), device)
        if not table:
            raise ValueError("weight: expected a table with an index, got one for each row")
    return resolve(backend, device, MIX)(tokens, log_probs, other_tokens, other_log_probs, weight, index)
