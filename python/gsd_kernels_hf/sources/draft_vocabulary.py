"""The tokens that a drafter can draft, and their ids in the target: a drafter's own vocabulary may be a reduced one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..records import Candidates, Sampler


class DraftVocabulary:
    """Draft tokens as the target's.

    Args:
        target_ids: int64 [draft], the target's id of every draft token; ``None``: they have the target's ids.
        size: of the vocabulary that these ids are of, as the drafter knows it.
        vocab_size: V, the target's, which may be smaller.
    """

    def __init__(self, target_ids: Tensor | None, size: int, vocab_size: int) -> None:
        self.target_ids, self.size, self.vocab_size = target_ids, size, vocab_size
        self.table: Tensor | None = None
        # Ids that ascend keep the order of ties, which go to the lowest one.
        if target_ids is not None and bool((target_ids.diff() > 0).all()) and int(target_ids[-1]) < vocab_size:
            self.table = pad(target_ids.to(torch.int32), (0, 1), value=-1)  # [draft + 1]; the last for "none"

    @classmethod
    def of(cls, module: Any, vocab_size: int) -> DraftVocabulary:
        """That of a drafter with ``sizes``, ``d2t`` and ``target_ids()``, for a target of ``vocab_size``."""
        return cls(None if module.d2t is None else module.target_ids(), module.sizes.vocab_size, vocab_size)

    def reduces(self, sampler: Sampler) -> bool:
        """Return whether draft tokens are ranked among themselves; noise and filters go by the target's ids."""
        return self.table is not None and sampler.greedy

    @property
    def columns(self) -> int:
        """Columns of the drafter's logits, as far as they are read."""
        return min(self.size, self.vocab_size) if self.target_ids is None else len(self.target_ids)

    def ranked(self, sampler: Sampler, logits: Tensor, positions: Tensor, branch: int) -> Candidates:
        """The best tokens by logits [B, W, draft] for int positions [B, W] of the text: [B, W, branch], target ids."""
        if self.table is None or not self.reduces(sampler):
            return sampler.candidates(self.whole(logits), positions, branch)
        tokens, log_probs = sampler.candidates(logits, positions, branch)
        return self.table[tokens.long()], log_probs

    def whole(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary, −inf for what is not drafted: [..., draft] → [..., V]."""
        if self.target_ids is not None:
            wide = logits.new_full((*logits.shape[:-1], self.size), -torch.inf)
            wide[..., self.target_ids] = logits
            logits = wide
        return logits[..., : self.vocab_size]
