from __future__ import annotations

import torch
from torch import Tensor

from ...backends import resolve
from ...checks import check_tensor
from . import compiled, reference, triton_op
from .table import NgramTable

INSERT = {
    "triton": triton_op.ngram_insert,
    "cpu": compiled.ngram_insert,
    "cuda": compiled.ngram_insert,
    "reference": reference.ngram_insert,
}
LOOKUP = {
    "triton": triton_op.ngram_lookup,
    "cpu": compiled.ngram_lookup,
    "cuda": compiled.ngram_lookup,
    "reference": reference.ngram_lookup,
}
PERTURB = {
    "triton": triton_op.perturb_candidates,
    "cpu": compiled.perturb_candidates,
    "cuda": compiled.perturb_candidates,
    "reference": reference.perturb_candidates,
}
MIX = {
    "triton": triton_op.mix_candidates,
    "cpu": compiled.mix_candidates,
    "cuda": compiled.mix_candidates,
    "reference": reference.mix_candidates,
}


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
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The best candidates of two sources: P = (1 − weight) · P(first) + weight · P(other), a token of both once.

    Interpolation of a model with a cache of recent text, as in Kuhn and De Mori (1990, "A cache-based natural language
    model for speech recognition").

    Args:
        tokens: int32 [B, W, K], distinct in a row, −1 for none.
        log_probs: float32 [B, W, K].
        other_tokens, other_log_probs: [B, W, K'], as the first two.
        weight: float32 [B, W], 0 … 1, of the other source.
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
    check_tensor("weight", weight, shape[:2], (torch.float32,), device)
    return resolve(backend, device, MIX)(tokens, log_probs, other_tokens, other_log_probs, weight)
