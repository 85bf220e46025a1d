"""Candidates for all later positions from one forward a step, the same below every path: a lattice when merged."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from gsd_kernels import GraphConfig

from ..records import Candidates, Verified
from .base import Level, OwnSource, Proposal, rows_at
from .draft_vocabulary import DraftVocabulary

FIRST_WEIGHT = 0.1  # beside another source, before anything was learned; what is too large costs rows at once


def shares_of(drafted: int) -> tuple[float, ...]:
    """Prior interpolation weights of ``drafted`` positions; beyond them there is nothing."""
    return (*[FIRST_WEIGHT] * drafted, 0.0)


class Lattice(OwnSource):
    """A draft source that keeps what a forward says of later positions until the next step.

    Attributes:
        vocabulary: of the drafter.
        row: int32 [B, n], 0 … n − 1.
    """

    vocabulary: DraftVocabulary
    row: Tensor

    def levels(self, config: GraphConfig) -> int:
        """How many levels of a shape have candidates."""
        return config.depth

    def num_rows(self, config: GraphConfig) -> int:
        """Rows that :meth:`step` forwards."""
        return 0

    def step(self, level: Level) -> None:
        """Make entries of what was emitted, forward, and keep what :meth:`at_depths` reads."""
        raise NotImplementedError

    def warm_step(self, level: Level) -> None:
        """Launch once what :meth:`step` launches, behind what is stored."""
        raise NotImplementedError

    def propose(self, level: Level) -> Proposal | None:
        """Candidates after nodes of each depth; the forward is at level 0. ``None`` beyond the last."""
        if level.number >= self.levels(level.config):
            return None
        if level.number:
            return self.at_depths(level)
        self.step(level)
        return replace(self.at_depths(level), rows=self.num_rows(level.config))

    def warm(self, level: Level, verified: Verified) -> Proposal | None:
        """The launches of a step, and candidates of as many positions."""
        if self.levels(level.config) == 0:
            return None
        self.warm_step(level)
        return self.at_depths(level)

    def keep_positions(self, logits: Tensor, level: Level) -> None:
        """Keep the candidates of logits [B, n, draft vocabulary] of the next n positions."""
        positions = level.first_pick[:, None] + self.row[:, : logits.shape[1]]
        behind = (0, 0, 0, 1)  # beyond the block there is nothing
        tokens, log_probs = self.ranked(logits, positions, level.config.branch)
        self.block = pad(tokens, behind, value=-1), pad(log_probs, behind, value=-torch.inf)

    def at_depths(self, level: Level) -> Proposal:
        """Candidates after the nodes of a frontier, by their depths."""
        tokens, log_probs = self.block
        place = level.frontier.depths.long().clamp(max=tokens.shape[1] - 1)  # [B, W]
        return Proposal(rows_at(tokens, place), rows_at(log_probs, place), place)

    def ranked(self, logits: Tensor, positions: Tensor, branch: int) -> Candidates:
        """The best tokens by logits [B, W, draft vocabulary] for positions int [B, W] of the text: [B, W, K]."""
        tokens, log_probs = self.vocabulary.ranked(self.sampler, logits, positions, branch)
        device = self.state.tokens.device
        return tokens.to(device), log_probs.to(device)
