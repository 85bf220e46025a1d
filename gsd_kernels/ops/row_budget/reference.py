from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...graph import Rows, TokenGraph
from ..flatten import flatten
from .records import OddsBelief

LEAST_LEFT = 1e-3  # of a node's probability, for its other edges: sources round
LEAST_SHARE = 0.01  # and at most 1 less that, of which the logit is taken
LEAST_LOG_PROB = -30.0
LEAST_ODDS = 1e-30


def paying_rows(
    graph: TokenGraph,
    num_accepted: Tensor,
    belief: OddsBelief,
    seconds: Tensor | None,
    max_rows: int,
    max_path: int,
    teaches: float,
) -> Rows:
    weighed = replace(graph, edge_log_probs=edge_odds(graph, num_accepted, belief))
    rows = flatten(weighed, max_rows, max_path, backend="reference")
    count = int(rows.num_rows.max())
    if seconds is not None:
        tokens = (rows.scores[:, : min(count, len(seconds))].double().exp().mean(0) + teaches).cumsum(0)  # [n]
        count = 1 + int((tokens / seconds[: len(tokens)]).argmax())
    return rows.first(count)


def edge_odds(graph: TokenGraph, num_accepted: Tensor, belief: OddsBelief) -> Tensor:
    """How likely every edge's token is right if the node before it is: logarithms, float32 [B, N, K]; 0 for no edge."""
    exists = graph.edge_targets >= 0  # [B, N, K]
    right = torch.sigmoid(_features(graph, num_accepted) @ belief.weights)  # [B, N, K]
    wrong = torch.where(exists, 1.0 - right, 1.0).cumprod(-1)
    before = torch.cat([torch.ones_like(wrong[..., :1]), wrong[..., :-1]], -1)  # no edge before it is right
    return torch.where(exists, (before * right).clamp(min=LEAST_ODDS).log(), 0.0).float()


def learn_edge_odds(
    graph: TokenGraph, num_accepted: Tensor, nodes: Tensor, picked: Tensor, belief: OddsBelief, drift: float
) -> OddsBelief:
    features = _features(graph, num_accepted)
    weights, covariance, prior = belief.weights.clone(), belief.covariance.clone(), belief.prior
    for b, path in enumerate(nodes.tolist()):
        for node, token in zip(path, picked[b].tolist(), strict=True):
            targets = graph.edge_targets[b, node].tolist() if node >= 0 else []
            for x, target in zip(features[b, node], targets, strict=False):
                if target < 0:
                    continue
                right = int(graph.token_ids[b, target]) == token
                covariance.diagonal().add_(drift * prior)
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
    return OddsBelief(weights, covariance, prior)


def _features(graph: TokenGraph, num_accepted: Tensor) -> Tensor:
    """float64 [B, N, K, F]"""
    exists = graph.edge_targets >= 0
    log_probs = torch.where(graph.edge_log_probs > LEAST_LOG_PROB, graph.edge_log_probs.double(), LEAST_LOG_PROB)
    prob = torch.where(exists, log_probs.clamp(max=0.0).exp(), 0.0)
    left = torch.ones_like(prob)  # by the edges before
    for k in range(1, prob.shape[-1]):
        left[..., k] = torch.where(
            exists[..., k - 1], (left[..., k - 1] - prob[..., k - 1]).clamp(min=LEAST_LEFT), left[..., k - 1]
        )
    share = (prob / left).clamp(LEAST_SHARE, 1.0 - LEAST_SHARE)
    logit = (share / (1.0 - share)).log()
    other = (exists.cumsum(-1) > 1).double()
    first = (graph.depths == 0).double()[..., None].expand_as(logit)
    before = num_accepted.clamp(min=1).double().log()[:, None, None].expand_as(logit)
    columns = (torch.ones_like(logit), logit, other, other * logit, first, first * before, (1.0 - first) * before)
    return torch.stack(columns, -1)
