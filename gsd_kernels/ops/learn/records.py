"""Records that learn_source reads and writes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Asked(NamedTuple):
    """The W nodes of one level that a source was asked about, and what it was mixed with."""

    node_ids: Tensor  # int32 [B, W], −1 for padding
    tokens: Tensor  # int32 [B, W, K], what it proposed
    log_probs: Tensor  # float32 [B, W, K]
    index: Tensor | None = None  # int32 [B, W], which of its weights holds for each node; None: the first
    first_tokens: Tensor | None = None  # int32 [B, W, K], of the sources before it; None: there was none
    first_log_probs: Tensor | None = None  # float32 [B, W, K]


class Mixture(NamedTuple):
    """Interpolation weights by index, float32 [n] each."""

    start: Tensor  # prior
    shares: Tensor  # expected number of picked tokens that were this source's
    counts: Tensor  # of picked tokens
    weights: Tensor  # shares / counts
