"""The n-gram table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...config import MAX_CONTEXT

MAX_WAYS = 16


@dataclass
class NgramTable:
    """Continuations by context, one fixed-size table a sequence, from which the least recently used entries go.

    Recurring token sequences recur across steps, not only inside one: a leaf whose last tokens were seen before takes
    over what followed them, at no draft cost.

    The key of a context names its set, ``ways`` neighbouring entries. A set lists its entries, the most recently
    inserted first: an entry's way is its age, and no clock is kept. Inserting a key moves it to the front of its set,
    and what is pushed over the end is forgotten. Only insertions are uses. Lookups come from many nodes at once, most
    of which are never reached; a context that is reached is verified, and so inserted again.
    """

    keys: Tensor  # int64 [B, capacity]; hash of a context and its length, 0 for free; set s has s·ways … s·ways+ways−1
    tokens: Tensor  # int32 [B, capacity, K]; continuations, best first, −1 for none
    log_probs: Tensor  # float32 [B, capacity, K]
    max_context: int  # contexts of 1 … max_context tokens are kept
    ways: int  # entries in a set

    @classmethod
    def empty(
        cls,
        batch: int,
        branch: int,
        device: torch.device | str,
        *,
        capacity: int = 1 << 15,
        max_context: int = 4,
        ways: int = 8,
    ) -> NgramTable:
        """A table of ``capacity`` entries a sequence with ``branch`` continuations each, ``ways`` entries in a set.

        Raises:
            ValueError: ``capacity`` or ``ways`` is no power of two, ``ways`` is not within 1 … 16 or more than
                ``capacity``, or ``max_context`` is not within 1 … 8.
        """
        if not 1 <= ways <= MAX_WAYS or ways & (ways - 1):
            raise ValueError(f"ways: expected a power of two from 1 to {MAX_WAYS}, got {ways}")
        if capacity < ways or capacity & (capacity - 1):
            raise ValueError(f"capacity: expected a power of two of at least ways={ways}, got {capacity}")
        if not 1 <= max_context <= MAX_CONTEXT:
            raise ValueError(f"max_context: expected 1 … {MAX_CONTEXT}, got {max_context}")
        shape = (batch, capacity, branch)
        return cls(
            keys=torch.zeros(shape[:2], dtype=torch.int64, device=device),
            tokens=torch.full(shape, -1, dtype=torch.int32, device=device),
            log_probs=torch.zeros(shape, dtype=torch.float32, device=device),
            max_context=max_context,
            ways=ways,
        )

    def clear(self) -> None:
        """Forget everything, in place."""
        self.keys.zero_()
        self.tokens.fill_(-1)
        self.log_probs.zero_()

    def check_contexts(self, contexts: Tensor) -> None:
        """Raise for contexts [B, *, C] of less than ``max_context`` tokens; all else the operator's line says."""
        if isinstance(contexts, Tensor) and contexts.dim() == 3 and contexts.shape[2] < self.max_context:
            raise ValueError(
                f"contexts: expected at least max_context={self.max_context} tokens of each, got {contexts.shape[2]}; "
                "pad with −1"
            )
