"""Queries that a module scales by their place in the cache, as Llama 4 does in layers without rotary embedding.

Its place is the cache's length plus the row's number, which is not where a row of a graph stands. While rows are
forwarded the cache says ``−number`` for its length, so that every row is at place 0, where the factor is 1; the
attention function multiplies by the factor of the row's own place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Temperature:
    """The factor log1p(⌊(place + 1) / floor⌋) · scale + 1; a place counts padding in, as transformers' does."""

    floor: float
    scale: float

    @classmethod
    def of(cls, module: nn.Module) -> Temperature | None:
        """Read a module's numbers, which may mean something else: it has to be proved."""
        numbers = getattr(module, "floor_scale", None), getattr(module, "attn_scale", None)
        if not all(isinstance(number, (int, float)) for number in numbers):
            return None
        return cls(*(float(number) for number in numbers))  # type: ignore[arg-type]

    def applied(self, query: Tensor, places: Tensor) -> Tensor:
        """``query`` [B, H, R, D], at ``places`` [B, R] rather than at place 0; rounded as transformers rounds it."""
        factor = torch.log1p(torch.floor((places.float() + 1.0) / self.floor)) * self.scale + 1.0
        return (query * factor[:, None, :, None]).to(query.dtype)

    def lengths(self, rows: int) -> tuple[int, ...]:
        """Lengths of a cache that tell other factors apart, of ``rows`` rows: around the steps of the factor."""
        step = int(self.floor)
        return max(0, step - rows), max(0, step - 1 - rows // 2), 3 * step + 1, 1000 * step
