from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...backends import resolve
from ...checks import check_tensor
from . import reference

INSERT = {"reference": reference.ngram_insert}
LOOKUP = {"reference": reference.ngram_lookup}


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
