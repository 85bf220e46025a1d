from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...graph import Rows, TokenGraph
from ..flatten import flatten
from .records import LogisticPosterior

MIN_LEFT = 1e-3  # probability left to a node's further edges, at least: sources round
MIN_SHARE = 0.01  # shares are clamped to MIN_SHARE … 1 − MIN_SHARE before the logit is taken
MIN_LOG_PROB = -30.0
MIN_PROB = 1e-30


def select_rows(
    graph: TokenGraph,
    num_accepted: Tensor,
    posterior: LogisticPosterior,
    seconds: Tensor | None,
    max_rows: int,
    max_path: int,
    row_bonus: float = 0.0,
) -> Rows:
    """The rows of ``graph``, likeliest first; their number maximises expected tokens a second.

    The probability that a source claims is rarely how often it is right: a long context that recurs is right more often
    than it says, and where the step before emitted many tokens the text is being repeated. A logistic model of
    :data:`~gsd_kernels.ops.select_rows.records.FEATURES` predicts the probability that an edge is right, given that its
    node is accepted and no better sibling is right. Siblings are normalised stick-breaking: edge k gets its probability
    of the mass that its better siblings left, so a node's children sum to at most 1. Rows are those of
    :func:`gsd_kernels.flatten` by these probabilities (at least 1e-30). A row's probability is the product along its
    path; their sum is the expected number of tokens of the step.

    Args:
        graph: merged; a node's edges are in order, best first.
        num_accepted: int32 [B], tokens that the step before emitted; less than 1 counts as 1.
        posterior: of the logistic model; its mean weights are used.
        seconds: float64 [n], of a step with 1 … n rows of every sequence, n at least 1; there are no more rows then.
            ``None``: all rows.
        max_rows, max_path: see :func:`gsd_kernels.flatten`.
        row_bonus: expected tokens of later steps that one more forwarded row is worth.

    Returns:
        :class:`~gsd_kernels.Rows` whose scores are log-probabilities; of equal throughputs the fewest rows.
    """
    weighed = replace(graph, edge_log_probs=predict_edges(graph, num_accepted, posterior))
    rows = flatten(weighed, max_rows, max_path, backend="reference")
    count = int(rows.num_rows.max())
    if seconds is not None:
        tokens = (rows.scores[:, : min(count, len(seconds))].double().exp().mean(0) + row_bonus).cumsum(0)  # [n]
        count = 1 + int((tokens / seconds[: len(tokens)]).argmax())
    return rows.first(count)


def predict_edges(graph: TokenGraph, num_accepted: Tensor, posterior: LogisticPosterior) -> Tensor:
    """Log-probabilities of every edge given its node, float32 [B, N, K]; 0 for no edge."""
    exists = graph.edge_targets >= 0  # [B, N, K]
    right = torch.sigmoid(_features(graph, num_accepted) @ posterior.weights)  # [B, N, K]
    wrong = torch.where(exists, 1.0 - right, 1.0).cumprod(-1)
    before = torch.cat([torch.ones_like(wrong[..., :1]), wrong[..., :-1]], -1)  # no better sibling is right
    return torch.where(exists, (before * right).clamp(min=MIN_PROB).log(), 0.0).float()


def update_edge_model(
    graph: TokenGraph,
    num_accepted: Tensor,
    nodes: Tensor,
    picked: Tensor,
    posterior: LogisticPosterior,
    process_noise: float = 0.0,
) -> LogisticPosterior:
    """The posterior after a step, given the target's picks after accepted nodes.

    The edges of an accepted node are observed best first, up to the right one, whether they had a row or not. Each is
    an observation of a logistic regression: one update of an extended Kalman filter (Fahrmeir, 1992, "Posterior mode
    estimation by extended Kalman filtering for multivariate dynamic generalized linear models").

    Args:
        graph, num_accepted: as :func:`select_rows` had them.
        nodes: int32 [B, P], of the accepted path; −2 beyond it.
        picked: int32 [B, P], the target's token after each.
        posterior: before the step; stays as it is.
        process_noise: share of its prior variance by which each weight's variance grows with every observation.
    """
    features = _features(graph, num_accepted)
    weights, covariance, prior = posterior.weights.clone(), posterior.covariance.clone(), posterior.prior
    for b, path in enumerate(nodes.tolist()):
        for node, token in zip(path, picked[b].tolist(), strict=True):
            targets = graph.edge_targets[b, node].tolist() if node >= 0 else []
            for x, target in zip(features[b, node], targets, strict=False):
                if target < 0:
                    continue
                right = int(graph.token_ids[b, target]) == token
                covariance.diagonal().add_(process_noise * prior)
                shrink = (prior / covariance.diagonal()).sqrt().clamp(max=1.0)
                covariance.mul_(shrink[:, None] * shrink)
                spread = covariance @ x
                expected = torch.sigmoid(weights @ x)
                slope = expected * (1.0 - expected)
                scale = 1.0 / (1.0 + slope * (x @ spread))
                weights.add_(spread * scale * (float(right) - expected))
                covariance.sub_(torch.outer(spread, spread) * slope * scale)
                if right:
                    break
    return LogisticPosterior(weights, covariance, prior)


def _features(graph: TokenGraph, num_accepted: Tensor) -> Tensor:
    """float64 [B, N, K, F]"""
    exists = graph.edge_targets >= 0
    log_probs = torch.where(graph.edge_log_probs > MIN_LOG_PROB, graph.edge_log_probs.double(), MIN_LOG_PROB)
    prob = torch.where(exists, log_probs.clamp(max=0.0).exp(), 0.0)
    left = torch.ones_like(prob)  # by better siblings
    for k in range(1, prob.shape[-1]):
        left[..., k] = (left[..., k - 1] - prob[..., k - 1]).clamp(min=MIN_LEFT)  # no edge has no probability
    share = (prob / left).clamp(MIN_SHARE, 1.0 - MIN_SHARE)
    logit = (share / (1.0 - share)).log()
    other = (exists.cumsum(-1) > 1).double()
    first = (graph.depths == 0).double()[..., None].expand_as(logit)
    before = num_accepted.clamp(min=1).double().log()[:, None, None].expand_as(logit)
    columns = (torch.ones_like(logit), logit, other, other * logit, first, first * before, (1.0 - first) * before)
    return torch.stack(columns, -1)
