"""P-EAGLE (arXiv 2602.01469): EAGLE-3 that drafts several tokens in one forward.

Behind the text's last position come rows of mask tokens, with one learned feature for all of them. Each sees the text
and the masks before it, and predicts the token of its own depth: candidates by depth, the same below every path.
"""

from __future__ import annotations

import torch

from gsd_kernels import GraphConfig

from .base import Level, Text
from .eagle3 import Eagle3, Eagle3Reading
from .lattice import Lattice, shares_of


class ParallelDrafts(Eagle3Reading, Lattice):
    """The draft source of an :class:`Eagle3` with masks: one forward a step."""

    name = "p-eagle"

    def __init__(self, module: Eagle3) -> None:
        super().__init__(module)
        self.extra_slots = module.config.num_parallel - 1  # of the masks
        self.shares = shares_of(module.config.num_parallel)

    def attach(self, text: Text) -> None:
        super().attach(text)
        if not text.first:
            return
        config, batch = self.module.config, len(self.cached)
        self.row = torch.arange(config.num_parallel, dtype=torch.int32, device=self.cached.device).expand(batch, -1)
        self.unknown = config.mask_token_id, self.module.mask_feature()

    def masks(self, config: GraphConfig) -> int:
        """Rows of masks in a step of a shape; its depth is as many as are read."""
        return min(config.depth, self.module.config.num_parallel) - 1

    def num_rows(self, config: GraphConfig) -> int:
        return config.chain_rows + self.masks(config)

    def step(self, level: Level) -> None:
        config, masks = level.config, self.masks(level.config)
        _, logits = self.feed(self.state.out_len - 1, config.chain_rows, unknown=masks, keep=1 + masks)
        self.keep_positions(self.known(logits), level)

    def warm_step(self, level: Level) -> None:
        config, rows = level.config, self.num_rows(level.config)
        self.rows.launch(self.state.out_len - 1, rows, rows)
        shape = (len(self.cached), self.masks(config) + 1, self.module.config.draft_vocab_size)
        self.keep_positions(self.rows.features.new_zeros(shape), level)
