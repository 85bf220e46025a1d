from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RecalledLevels(NamedTuple):
    """The W nodes expanded at each of L levels, E = L·W places, and what is known of each."""

    node_ids: Tensor  # int32 [B, E], level by level, −1 for padding
    tokens: Tensor  # int32 [B, E, K], −1 for none
    log_probs: Tensor  # float32 [B, E, K]; −inf for none
    matched: Tensor  # int32 [B, E], as history_recall says it
