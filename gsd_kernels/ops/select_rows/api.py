"""On the CPU only, where the host decides how many rows a step has."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...backends import implementations_of, resolve_without_triton
from ...checks import check_tensor
from ...graph import Rows, TokenGraph
from ..flatten.api import check_limits
from . import compiled, reference
from .records import FEATURES, LogisticPosterior

__all__ = ["FEATURES", "LogisticPosterior", "select_rows", "update_edge_model"]

ROWS = implementations_of("select_rows", cpu=compiled, reference=reference)
LEARN = implementations_of("update_edge_model", cpu=compiled, reference=reference)


def select_rows(
    graph: TokenGraph,
    num_accepted: Tensor,
    posterior: LogisticPosterior,
    seconds: Tensor | None,
    *,
    max_rows: int,
    max_path: int,
    row_bonus: float = 0.0,
    backend: str = "auto",
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
        backend: see :mod:`gsd_kernels.backends`.

    Returns:
        :class:`~gsd_kernels.Rows` whose scores are log-probabilities; of equal throughputs the fewest rows.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range.
    """
    device = graph.token_ids.device
    check_tensor("num_accepted", num_accepted, (graph.token_ids.shape[0],), (torch.int32,), device)
    _check(posterior, device)
    if seconds is not None:
        check_tensor("seconds", seconds, (None,), (torch.float64,), device)
        if seconds.shape[0] < 1:
            raise ValueError("seconds: expected those of one row at least, got none")
    check_limits(max_rows, max_path)
    function = resolve_without_triton(backend, device, ROWS)
    return function(graph, num_accepted, posterior, seconds, max_rows, max_path, row_bonus)


def update_edge_model(
    graph: TokenGraph,
    num_accepted: Tensor,
    nodes: Tensor,
    picked: Tensor,
    posterior: LogisticPosterior,
    *,
    process_noise: float = 0.0,
    backend: str = "auto",
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
        backend: see :mod:`gsd_kernels.backends`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range.
    """
    device, batch = graph.token_ids.device, graph.token_ids.shape[0]
    check_tensor("num_accepted", num_accepted, (batch,), (torch.int32,), device)
    check_tensor("nodes", nodes, (batch, None), (torch.int32,), device)
    check_tensor("picked", picked, tuple(nodes.shape), (torch.int32,), device)
    _check(posterior, device)
    if not (math.isfinite(process_noise) and process_noise >= 0.0):
        raise ValueError(f"process_noise: expected a finite number of at least 0, got {process_noise}")
    return resolve_without_triton(backend, device, LEARN)(graph, num_accepted, nodes, picked, posterior, process_noise)


def _check(posterior: LogisticPosterior, device: torch.device) -> None:
    for name, shape in (("weights", (FEATURES,)), ("covariance", (FEATURES, FEATURES)), ("prior", (FEATURES,))):
        check_tensor(f"posterior.{name}", getattr(posterior, name), shape, (torch.float64,), device)
