from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...backends import resolve
from ...checks import check_tensor
from . import compiled, reference

INSERT = {"cpu": compiled.ngram_insert, "reference": reference.ngram_insert}
LOOKUP = {"cpu": compiled.ngram_lookup, "reference": reference.ngram_lookup}
MIX = {"cpu": compiled.mix_candidates, "reference": reference.mix_candidates}


@dataclass
class NgramTable:
    """Continuations by context, one fixed-size table a sequence; direct-mapped, so the newest entry wins a slot.

    Recurring token sequences recur across steps, not only inside one: a leaf whose last tokens were seen before takes
    over what followed them, at no draft cost.
    """

    keys: Tensor  # int64 [B, capacity + 1]; hash of a context and its length, 0 for free; the last slot is a spare
    tokens: Tensor  # int32 [B, capacity + 1, K]; continuations, best first, −1 for none
    log_probs: Tensor  # float32 [B, capacity + 1, K]
    max_context: int  # contexts of 1 … max_context tokens are kept

    @classmethod
    def empty(
        cls, batch: int, branch: int, device: torch.device | str, *, capacity: int = 1 << 15, max_context: int = 4
    ) -> NgramTable:
        """A table of ``capacity`` entries (a power of two) a sequence with ``branch`` continuations each."""
        if capacity < 2 or capacity & (capacity - 1):
            raise ValueError(f"capacity: expected a power of two, got {capacity}")
        shape = (batch, capacity + 1, branch)
        return cls(
            keys=torch.zeros(shape[:2], dtype=torch.int64, device=device),
            tokens=torch.full(shape, -1, dtype=torch.int32, device=device),
            log_probs=torch.zeros(shape, dtype=torch.float32, device=device),
            max_context=max_context,
        )


def ngram_insert(
    table: NgramTable, contexts: Tensor, tokens: Tensor, log_probs: Tensor, valid: Tensor, *, backend: str = "auto"
) -> None:
    """Remember what follows each context, for all its lengths, in place. Of equal contexts the last one stays.

    Args:
        table: the tables.
        contexts: int32 [B, M, C], tokens before the continuation, nearest first, −1 where the text begins.
        tokens: int32 [B, M, K], continuations, best first, −1 for none.
        log_probs: float32 [B, M, K].
        valid: bool [B, M], entries to take.
        backend: see :mod:`gsd_kernels.backends`.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    device, (batch, m) = table.keys.device, contexts.shape[:2]
    check_tensor("contexts", contexts, (table.keys.shape[0], None, None), (torch.int32,), device)
    check_tensor("tokens", tokens, (batch, m, table.tokens.shape[2]), (torch.int32,), device)
    check_tensor("log_probs", log_probs, (batch, m, table.tokens.shape[2]), (torch.float32,), device)
    check_tensor("valid", valid, (batch, m), (torch.bool,), device)
    resolve(backend, device, INSERT)(table, contexts, tokens, log_probs, valid)


def ngram_lookup(table: NgramTable, contexts: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """What followed each context, by the longest one known.

    Args:
        table: the tables.
        contexts: int32 [B, W, C], nearest token first.
        backend: see :mod:`gsd_kernels.backends`.

    Returns:
        tokens int32 [B, W, K] (−1 for none), log-probabilities float32 [B, W, K], and the length of the matched
        context int32 [B, W] (0 for none).
    """
    check_tensor("contexts", contexts, (table.keys.shape[0], None, None), (torch.int32,), table.keys.device)
    return resolve(backend, table.keys.device, LOOKUP)(table, contexts)


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
