"""Newly emitted tokens as the rows of one forward: a chain behind what a draft's cache holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gsd_kernels.ops.step.reference import laid_out


@dataclass(frozen=True)
class Chain:
    """E rows, right-aligned, so that the end of the chain is the last row; padding rows write above it.

    Attributes:
        place: int64 [B, E], position in the text of each row; of padding rows that of the first.
        real: bool [B, E], whether a row is no padding.
        slots: int32 [B, E], cache position minus what is cached.
        ancestor_mask: int32 [B, E, words], what each row sees of the others.
        depths: int32 [B, E], position minus what is cached; 0 for padding.
        node_depths: int32 [B, E], of the slots.
        count: int [B], of real rows.
    """

    place: Tensor
    real: Tensor
    slots: Tensor
    ancestor_mask: Tensor
    depths: Tensor
    node_depths: Tensor
    count: Tensor

    @classmethod
    def of(cls, cached: Tensor, end: Tensor, width: int, kv_start: Tensor | None = None) -> Chain:
        """The chain of up to ``width`` positions from ``cached`` [B] to ``end`` [B].

        ``kv_start`` [B]: positions before are left padding, which sees itself alone and which nothing sees; ``None``
        where there are none.
        """
        first = None if kv_start is None else kv_start - cached
        count, real, slots, depths, mask = laid_out(end - cached, width, first)
        place = (cached[:, None] + depths).long()
        row = torch.arange(width, dtype=torch.int32, device=cached.device)
        return cls(place, real, slots, mask, depths, row.expand_as(slots), count)
