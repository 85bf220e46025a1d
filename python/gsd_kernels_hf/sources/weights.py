"""Statistics of draft sources, learned from what the target picked: interpolation weights and reliability.

All state lies on the device and is updated in place; nothing here waits for it, so that a step can be captured. It
decides what is worth a row, never what is accepted.

They sink back to their priors by what was observed since, see :func:`gsd_kernels.ops.learn.learn_source`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from gsd_kernels.ops.learn import Asked, Mixture, Reliability, learn_source
from gsd_kernels.ops.ngram import calibrate_candidates

PRIOR_COUNT = 8.0  # observations that the starting values count for
MEMORY_COUNT = 400.0  # observations after which an older one counts 1/e


def mixture_of(start: Sequence[float], device: torch.device) -> Mixture:
    """Interpolation weights w in P = (1 − w) · P(first) + w · P(other), by index; a start of 0 stays 0."""
    prior = torch.tensor(start, dtype=torch.float32, device=device)  # [n]
    return Mixture(prior, PRIOR_COUNT * prior, torch.full_like(prior, PRIOR_COUNT), prior.clone())


def reliability_of(start: Sequence[float], branch: int, device: torch.device) -> Reliability:
    """Ratio of how often candidates were right to their probability, by index and rank; index 0 is no match.

    Args:
        start: prior of this ratio by index.
        branch: ranks that are told apart.
        device: of the tables.
    """
    ratio = torch.tensor(start, dtype=torch.float32, device=device)[:, None].expand(-1, branch)
    prior = PRIOR_COUNT * ratio  # float32 [n, K]
    return Reliability(prior, prior.clone(), torch.full_like(prior, PRIOR_COUNT), ratio.log())


class SourceWeights:
    """Statistics of one source: its interpolation weights, and its reliability where it is alone.

    Args:
        shares: prior interpolation weight by ``Proposal.index``.
        reliability: prior by ``Proposal.index``, see :func:`reliability_of`; ``None``: probabilities are taken as they
            are.
        branch: ranks that are told apart.
        device: of the tables.
    """

    def __init__(
        self, shares: Sequence[float], reliability: Sequence[float] | None, branch: int, device: torch.device
    ) -> None:
        self.mixture = mixture_of(shares, device)
        self.reliability = None if reliability is None else reliability_of(reliability, branch, device)

    def calibrated(self, log_probs: Tensor, index: Tensor | None, backend: str = "auto") -> Tensor:
        """Log-probabilities float32 [B, W, K], best first, corrected by the reliability of each index [B, W]."""
        if self.reliability is None:
            return log_probs
        return calibrate_candidates(log_probs, self.reliability.log_ratio, index=index, backend=backend)

    def learn(self, asked: Sequence[Asked], nodes: Tensor, picked: Tensor, backend: str = "auto") -> None:
        """Update by the target's picks, int32 [B, P], after nodes of the accepted path."""
        if asked and (self.reliability is not None or any(level.first_tokens is not None for level in asked)):
            tables = (self.mixture, self.reliability)
            learn_source(asked, nodes, picked, *tables, prior_count=PRIOR_COUNT, memory=MEMORY_COUNT, backend=backend)

    def learned(self) -> tuple[float, float]:
        """Picked tokens by which the interpolation weights were learned, and which share of them was this source's.

        Without the prior, which an unseen source has of it; (0, 0) where nothing was seen. Waits for the device.
        """
        start, shares, counts, _ = (table.tolist() for table in self.mixture)
        picked = sum(counts) - PRIOR_COUNT * len(counts)
        mine = sum(shares) - PRIOR_COUNT * sum(start)
        return (picked, min(1.0, max(0.0, mine / picked))) if picked > 0 else (0.0, 0.0)

    def forget(self) -> None:
        """Go back to the priors."""
        start, shares, counts, weights = self.mixture
        shares.copy_(PRIOR_COUNT * start)
        counts.fill_(PRIOR_COUNT)
        weights.copy_(start)
        if self.reliability is not None:
            prior, hits, claimed, log_ratio = self.reliability
            hits.copy_(prior)
            claimed.fill_(PRIOR_COUNT)
            torch.div(prior, PRIOR_COUNT, out=log_ratio).log_()

    def clone(self) -> SourceWeights:
        """The same tables in storage of their own."""
        return copy.deepcopy(self)

    def copy_(self, other: SourceWeights) -> None:
        """Copy the tables of ``other`` into these."""
        for mine, theirs in zip(
            (*self.mixture, *(self.reliability or ())), (*other.mixture, *(other.reliability or ())), strict=True
        ):
            mine.copy_(theirs)
