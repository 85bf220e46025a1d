"""Candidates for all later positions from one forward a step, the same below every path: a lattice when merged."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..records import Candidates
from .base import Level, Proposal
from .draft_vocabulary import DraftVocabulary
from .features import FeatureSource

FIRST_WEIGHT = 0.1  # beside another source, before anything was learned; what is too large costs rows at once


def shares_of(drafted: int) -> tuple[float, ...]:
    """Prior interpolation weights of ``drafted`` positions; beyond them there is nothing."""
    return (*[FIRST_WEIGHT] * drafted, 0.0)


class Lattice(FeatureSource):
    """A draft source that keeps what a forward says of later positions until the next step.

    Attributes:
        vocabulary: of the drafter.
        row: int32 [B, n], 0 … n − 1.
    """

    vocabulary: DraftVocabulary
    row: Tensor

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
        at = place[..., None].expand(-1, -1, tokens.shape[2])
        return Proposal(tokens.gather(1, at), log_probs.gather(1, at), place)

    def ranked(self, logits: Tensor, positions: Tensor, branch: int) -> Candidates:
        """The best tokens by logits [B, W, draft vocabulary] for positions int [B, W] of the text: [B, W, K]."""
        tokens, log_probs = self.vocabulary.ranked(self.sampler, logits, positions, branch)
        device = self.state.tokens.device
        return tokens.to(device), log_probs.to(device)
