from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...backends import implementations_of, resolve_without_triton
from ...checks import check_tensor
from . import compiled, reference
from .records import Asked, Mixture, Reliability

__all__ = ["MAX_LEVELS", "Asked", "Mixture", "Reliability", "learn_source"]

IMPLEMENTATIONS = implementations_of("learn_source", cpu=compiled, cuda=compiled, reference=reference)
MAX_LEVELS = 64
"""That the compiled op takes; of more, those alike are joined."""


def learn_source(
    asked: Sequence[Asked],
    nodes: Tensor,
    picked: Tensor,
    mixture: Mixture,
    reliability: Reliability | None = None,
    *,
    prior_count: float,
    memory: float,
    backend: str = "auto",
) -> None:
    """Update a source's statistics, in place, by what the target picked after nodes that the source was asked about.

    Interpolation weights w of P = (1 − w) · P(first) + w · P(source) by one step of expectation maximisation: how
    likely each picked token came from the source is its share of the mixture at that token (deleted interpolation;
    Jelinek and Mercer, 1980, "Interpolated estimation of Markov source parameters from sparse data"). Candidates are
    the likeliest of a distribution: a token that is none of them has half of what it could have at most. Reliability by
    counting a source's candidates that were picked, and their probabilities, by rank; index 0 is no match and stays.
    Both sink back to their priors by what is observed.

    There is no Triton kernel: ``backend="triton"`` takes what ``"auto"`` does.

    Args:
        asked: the levels, at least one; a node is in one of them at most.
        nodes: int32 [B, P], of the accepted path; −2 beyond it.
        picked: int32 [B, P], the target's token after each.
        mixture: learned where the source was mixed with others.
        reliability: learned at all levels; ``None``: not at all.
        prior_count: observations that priors count for.
        memory: observations after which an older one counts 1/e.
        backend: see :mod:`gsd_kernels.backends`.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    if not asked:
        raise ValueError("asked: expected at least one level")
    device, (batch, path) = nodes.device, nodes.shape
    check_tensor("nodes", nodes, (None, None), (torch.int32,), device)
    check_tensor("picked", picked, (batch, path), (torch.int32,), device)
    branch = asked[0].tokens.shape[2]
    for level in asked:
        width = level.node_ids.shape[1]
        check_tensor("asked.node_ids", level.node_ids, (batch, None), (torch.int32,), device)
        check_tensor("asked.tokens", level.tokens, (batch, width, branch), (torch.int32,), device)
        check_tensor("asked.log_probs", level.log_probs, (batch, width, branch), (torch.float32,), device)
        if level.index is not None:
            check_tensor("asked.index", level.index, (batch, width), (torch.int32,), device)
        if level.first_tokens is not None:
            check_tensor("asked.first_tokens", level.first_tokens, (batch, width, branch), (torch.int32,), device)
            check_tensor(
                "asked.first_log_probs", level.first_log_probs, (batch, width, branch), (torch.float32,), device
            )
    if reliability is not None and reliability.prior.shape[1] < branch:
        raise ValueError(f"reliability: expected at least {branch} ranks, got {reliability.prior.shape[1]}")
    if len(asked) > MAX_LEVELS:
        asked = _joined(asked)
    function = resolve_without_triton(backend, device, IMPLEMENTATIONS)
    function(asked, nodes, picked, mixture, reliability, prior_count, memory)


def _joined(asked: Sequence[Asked]) -> list[Asked]:
    """The levels that were mixed side by side as one, and the others."""
    groups = ([a for a in asked if (a.first_tokens is None) == alone] for alone in (False, True))
    return [Asked(*map(_side_by_side, zip(*map(_indexed, group), strict=True))) for group in groups if group]


def _indexed(level: Asked) -> Asked:
    return level if level.index is not None else level._replace(index=torch.zeros_like(level.node_ids))


def _side_by_side(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    return None if parts[0] is None else torch.cat([t for t in parts if t is not None], 1)
