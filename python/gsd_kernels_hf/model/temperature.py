"""Queries that a module scales by their place in the cache, as Llama 4 does in layers without rotary embedding.

Its place is the cache's length plus the row's number, which is not where a row of a graph stands. While rows are
forwarded the cache says ``−number`` for its length, so that every row is at place 0, where the factor is 1; the
attention function multiplies by the factor of the row's own place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SCALES = "transformers.models.llama4.modeling_llama4.Llama4TextAttention"
"""The class that scales its queries so."""


@dataclass(frozen=True)
class Temperature:
    """The factor log1p(⌊(place + 1) / floor⌋) · scale + 1; a place counts padding in, as transformers' does."""

    floor: float
    scale: float

    @classmethod
    def of(cls, module: Any) -> Temperature | None:
        """The numbers of Llama 4's own attention where it scales; ``None`` for any other, which may mean others."""
        known = f"{type(module).__module__}.{type(module).__qualname__}" == SCALES
        if not known or module.use_rope or not module.attn_temperature_tuning:
            return None
        return cls(float(module.floor_scale), float(module.attn_scale))

    def applied(self, query: Tensor, places: Tensor) -> Tensor:
        """``query`` [B, H, R, D], at ``places`` [B, R] rather than at place 0; rounded as transformers rounds it."""
        factor = torch.log1p(torch.floor((places.float() + 1.0) / self.floor)) * self.scale + 1.0
        return (query * factor[:, None, :, None]).to(query.dtype)
