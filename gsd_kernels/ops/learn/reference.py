from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .records import Asked, Mixture


def learn_source(
    asked: Sequence[Asked], nodes: Tensor, picked: Tensor, mixture: Mixture, prior_count: float, memory: float
) -> None:
    """Update a source's weights, in place, by what the target picked after nodes where it was mixed with others.

    Interpolation weights w of P = (1 − w) · P(first) + w · P(source) by one step of expectation maximisation: how
    likely each picked token came from the source is its share of the mixture at that token (deleted interpolation;
    Jelinek and Mercer, 1980, "Interpolated estimation of Markov source parameters from sparse data"). Candidates are
    the likeliest of a distribution: a token that is none of them has half of what it could have at most. Weights sink
    back to their priors by what is observed.

    There is no Triton kernel: ``backend="triton"`` takes what ``"auto"`` does.

    Args:
        asked: the levels, at least one, each with what it was mixed with; a node is in one of them at most.
        nodes: int32 [B, P], of the accepted path; −2 beyond it.
        picked: int32 [B, P], the target's token after each.
        mixture: what is learned.
        prior_count: observations that priors count for.
        memory: observations after which an older one counts 1/e.
    """
    at, found = _places(asked, nodes)
    index = _index(asked).gather(1, at).clamp(0, len(mixture.start) - 1)
    other = _probability(asked, "tokens", "log_probs", at, picked)
    first = _probability(asked, "first_tokens", "first_log_probs", at, picked)
    w = mixture.weights[index]
    seen = found & (w * other + (1.0 - w) * first > 0)
    theirs = w * torch.where(other > 0, other, _unnamed(asked, "log_probs", at))
    both = theirs + (1.0 - w) * torch.where(first > 0, first, _unnamed(asked, "first_log_probs", at))
    counted = torch.zeros_like(mixture.counts).index_add_(0, index.flatten(), seen.float().flatten())
    share = torch.where(seen, theirs / both, 0.0)
    shares = torch.zeros_like(mixture.shares).index_add_(0, index.flatten(), share.flatten())
    _add(mixture.shares, prior_count * mixture.start, shares, counted, memory)
    _add(mixture.counts, prior_count, counted, counted, memory)
    torch.div(mixture.shares, mixture.counts, out=mixture.weights)


def _places(asked: Sequence[Asked], nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Place of every node among the levels' nodes, side by side: int64 [B, P], and whether it is there."""
    same = torch.cat([level.node_ids for level in asked], 1)[:, None, :] == nodes[:, :, None]  # [B, P, E]
    return same.int().argmax(-1), same.any(-1)


def _index(asked: Sequence[Asked]) -> Tensor:
    """[B, E]"""
    return torch.cat([torch.zeros_like(lvl.node_ids) if lvl.index is None else lvl.index for lvl in asked], 1).long()


def _take(entries: list[Tensor], at: Tensor) -> Tensor:
    """[B, W, K] each → [B, P, K]"""
    whole = torch.cat(entries, 1)
    return whole.gather(1, at[..., None].expand(-1, -1, whole.shape[2]))


def _probability(asked: Sequence[Asked], tokens: str, log_probs: str, at: Tensor, picked: Tensor) -> Tensor:
    """That candidates gave to the picked tokens, float32 [B, P]."""
    ids, scores = (_take([getattr(level, name) for level in asked], at) for name in (tokens, log_probs))
    return torch.where(ids == picked[..., None], scores.exp(), 0.0).sum(-1)


def _unnamed(asked: Sequence[Asked], log_probs: str, at: Tensor) -> Tensor:
    """Chance that candidates leave to a token that is none of them, float32 [B, P]: half of the most it could be."""
    probs = _take([getattr(level, log_probs) for level in asked], at).exp()
    return 0.5 * torch.minimum((1.0 - probs.sum(-1)).clamp(min=0.0), probs.amin(-1))


def _add(table: Tensor, prior: Tensor | float, new: Tensor, observed: Tensor, memory: float) -> None:
    """Add to a table that sinks back to its prior by how much was observed."""
    table.sub_(prior).mul_((-observed / memory).exp()).add_(prior).add_(new)
