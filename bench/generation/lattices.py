"""A lattice drafter of one's own beside the pair's, and what its lattice is without the edges.

Without edges, every place has the candidates that the drafter itself gives it on average: its probabilities after each
token of the place before, weighed by how likely that token is. So both say the same of every place by itself, verify as
many rows, and cost the same forward; what differs is whether a token's score knows the one before.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gsd_kernels import DFlash
from gsd_kernels_cli.demo.drafters import fitted_drafter
from gsd_kernels_hf.sources.base import Level
from gsd_kernels_hf.sources.dflash import DFlashDrafts
from gsd_kernels_hf.sources.edges import MarkovHead, Selector
from gsd_kernels_hf.sources.load import load_drafter

from .pairs import Pair

KIND = "lattice"
LIKELY = 64
"""Tokens of a place over which the next place's probabilities are summed; the rest of its probability is theirs."""


class Marginals(DFlashDrafts):
    """The candidates of a drafter with edges, the same after every token of a place."""

    name = "marginals"

    @property
    def by_node(self) -> bool:
        """No: candidates depend on the depth of a node alone."""
        return False

    def keep(self, hidden: Tensor, logits: Tensor, level: Level) -> None:
        """Keep the candidates of states [B, n, D] and logits [B, n, V] of the drafted places."""
        self.hidden, self.logits = hidden, logits
        self.keep_positions(self.marginals(hidden, logits), level)

    def marginals(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """Logits of every place by itself, float32 [B, n, V], which the sampler's temperature makes probabilities of.

        P₀(b) = P(b | root), P_t(b) = Σ_a P_{t−1}(a) · P_t(b | a).
        """
        edges, warmth = self.module.edges, 1.0 if self.sampler.greedy else float(self.sampler.warpers["temperature"])
        before = self.known_tokens(self.state.root_tokens())[:, None]  # [B, W], W the tokens that may come before
        weights = logits.new_zeros(before.shape, dtype=torch.float32)  # [B, W], log-probabilities of these
        target_ids, found = self.module.target_ids().to(logits.device), []
        for place in range(logits.shape[1]):
            at, width = slice(place, place + 1), before.shape[1]
            scored = edges(logits[:, at].expand(-1, width, -1), hidden[:, at].expand(-1, width, -1), before)
            after = torch.log_softmax(scored.float() / warmth, -1) + weights[..., None]  # [B, W, V]
            found.append(after.logsumexp(1))
            likely, drafted = found[-1].topk(min(LIKELY, logits.shape[2]), -1)
            before, weights = self.known_tokens(target_ids[drafted]), torch.log_softmax(likely, -1)
        return warmth * torch.stack(found, 1)


def with_lattice(pair: Pair, folder: Path) -> Pair:
    """The pair with the drafter in ``folder`` as its lattice; without its confidence head, if it has one.

    That head speaks of one node, so that a lattice without edges could not have it.

    Raises:
        ValueError: no drafter of the pair's target that can be served, or one whose edges depend on no single token.
    """
    source = pair.target if pair.source is None else pair.source
    drafter = load_drafter(folder, source)
    if not isinstance(drafter, DFlash) or not isinstance(drafter.edges, MarkovHead | Selector):
        raise ValueError(
            f"--drafter: expected a DSpark (vanilla or gated) or DFlash 2 drafter, whose tokens depend on the one "
            f"before, got {drafter!r}; other kinds have no edges to leave out"
        )
    drafter.confidence_head = None
    if source is not pair.target:
        drafter = fitted_drafter(drafter, source, pair.target)
    return replace(pair, drafters={**pair.drafters, KIND: drafter})
