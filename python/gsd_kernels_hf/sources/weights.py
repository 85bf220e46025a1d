"""Statistics of draft sources, learned from what the target picked: interpolation weights, reliability, calibration.

All state lies on the device and is updated in place; nothing here waits for it, so that a step can be captured. It
decides what is worth a row, never what is accepted.

Interpolation weights and reliability sink back to their priors by what was observed since (:func:`_add`). The table of
:class:`Calibration` is counted on the host by :mod:`gsd_kernels_hf.policy.acceptance`, which forgets by steps, because
it also needs those counts to predict what a shape gains.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

PRIOR = 8.0  # observations that the starting values count for
MEMORY = 400.0  # observations after which an older one counts 1/e


class Mixture:
    """Interpolation weight w of a second source in P = (1 − w) · P(first) + w · P(other), for every value of an index.

    Learned by one step of expectation maximisation a verified step: how likely each picked token came from the other
    source is its share of the mixture at that token (deleted interpolation; Jelinek and Mercer, 1980, "Interpolated
    estimation of Markov source parameters from sparse data").

    Args:
        start: w before anything was seen, by index; 0 stays 0.
        device: of the tables.
    """

    def __init__(self, start: Sequence[float], device: torch.device) -> None:
        self.start = torch.tensor(start, dtype=torch.float32, device=device)  # [n]
        self.shares = PRIOR * self.start
        self.counts = torch.full_like(self.start, PRIOR)
        self.weights = self.start.clone()  # float32 [n]

    def of(self, index: Tensor) -> Tensor:
        """w for every index, float32 of its shape."""
        return self.weights[index.long()]

    def learn(self, index: Tensor, first: Tensor, other: Tensor, seen: Tensor) -> None:
        """Update w from the probabilities that both sources gave the picked tokens.

        Args:
            index: int [B, P].
            first, other: float32 [B, P], the probabilities; 0 where the token was no candidate.
            seen: bool [B, P], which entries to learn from.
        """
        w = self.of(index)
        theirs = w * other
        both = theirs + (1.0 - w) * first
        seen = seen & (both > 0)
        counted = torch.zeros_like(self.counts).index_add_(0, index.flatten().long(), seen.float().flatten())
        share = torch.where(seen, theirs / both, 0.0)
        shares = torch.zeros_like(self.shares).index_add_(0, index.flatten().long(), share.flatten())
        _add(self.shares, PRIOR * self.start, shares, counted)
        _add(self.counts, PRIOR, counted, counted)
        torch.div(self.shares, self.counts, out=self.weights)


class Reliability:
    """Ratio of how often candidates were right to the probability that they had, by context length and rank.

    Args:
        start: prior of this ratio by context length (``Proposal.index``); length 0 is no match.
        branch: ranks that are told apart.
        device: of the tables.
    """

    def __init__(self, start: Sequence[float], branch: int, device: torch.device) -> None:
        ratio = torch.tensor(start, dtype=torch.float32, device=device)[:, None].expand(-1, branch)
        self.prior = PRIOR * ratio
        self.hits = self.prior.clone()  # float32 [C + 1, K]
        self.claimed = torch.full_like(self.hits, PRIOR)
        self.log_ratio = ratio.log()  # float32 [C + 1, K]

    def __call__(self, log_probs: Tensor, matched: Tensor) -> Tensor:
        """Calibrate log-probabilities float32 [B, W, K], best first, by matched context length [B, W]; at most 0."""
        return (log_probs + self.log_ratio[matched.long(), : log_probs.shape[2]]).clamp(max=0.0)

    def learn(self, log_probs: Tensor, matched: Tensor, hits: Tensor, seen: Tensor) -> None:
        """Update the ratio.

        Args:
            log_probs: float32 [B, P, K], of the candidates, uncalibrated.
            matched: int [B, P], context length.
            hits: bool [B, P, K], which candidate the target picked.
            seen: bool [B, P], which entries to learn from.
        """
        index, k = matched.flatten().long(), log_probs.shape[2]
        known = (seen & (matched > 0))[..., None] & (log_probs > -torch.inf)
        claimed = torch.where(known, log_probs.exp(), 0.0).flatten(0, 1)
        new_claims, new_hits = torch.zeros_like(self.claimed), torch.zeros_like(self.hits)
        new_claims[:, :k].index_add_(0, index, claimed)
        new_hits[:, :k].index_add_(0, index, (hits & known).float().flatten(0, 1))
        _add(self.claimed, PRIOR, new_claims, new_claims)
        _add(self.hits, self.prior, new_hits, new_claims)
        torch.div(self.hits, self.claimed, out=self.log_ratio).log_()


def _add(table: Tensor, prior: Tensor | float, new: Tensor, observed: Tensor) -> None:
    """Add to a table that sinks back to its prior by how much was observed."""
    table.sub_(prior).mul_((-observed / MEMORY).exp()).add_(prior).add_(new)


class Calibration:
    """Calibration of draft log-probabilities: how often such a candidate was the target's pick.

    A table of log-ratios by rank and draft probability, on the device.

    Args:
        branch: ranks that are told apart.
        device: of the table.
    """

    EDGES = (0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # between bins of draft probability

    def __init__(self, branch: int, device: torch.device) -> None:
        self.edges = torch.tensor(self.EDGES, device=device)
        self.log_ratio = torch.zeros(branch, len(self.EDGES) + 1, device=device)

    def __call__(self, log_probs: Tensor) -> Tensor:
        """Calibrate log-probabilities float32 [B, W, K], best candidate first; at most 0."""
        bins = torch.bucketize(log_probs.exp(), self.edges)  # [B, W, K]
        rank = torch.arange(log_probs.shape[2], device=log_probs.device)
        return (log_probs + self.log_ratio[rank, bins]).clamp(max=0.0)


class SourceWeights:
    """Statistics of one source: its interpolation weights, and its reliability where it is alone.

    Args:
        shares: prior interpolation weight by ``Proposal.index``, see :class:`Mixture`.
        reliability: prior by ``Proposal.index``, see :class:`Reliability`; ``None``: probabilities are taken as they
            are.
        branch: ranks that are told apart.
        device: of the tables.
    """

    def __init__(
        self, shares: Sequence[float], reliability: Sequence[float] | None, branch: int, device: torch.device
    ) -> None:
        self.mixture = Mixture(shares, device)
        self.reliability = None if reliability is None else Reliability(reliability, branch, device)

    def clone(self) -> SourceWeights:
        """The same tables in storage of their own."""
        return copy.deepcopy(self)

    def copy_(self, other: SourceWeights) -> None:
        """Copy the tables of ``other`` into these."""
        for mine, theirs in ((self.mixture, other.mixture), (self.reliability, other.reliability)):
            if mine is not None:
                for name, table in vars(mine).items():
                    table.copy_(getattr(theirs, name))
