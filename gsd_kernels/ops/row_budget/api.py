"""On the CPU only, where the host decides how many rows a step has."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...backends import resolve_without_triton
from ...checks import check_tensor
from ...graph import Rows, TokenGraph
from ..flatten.api import check_limits
from . import compiled, reference
from .records import FEATURES, OddsBelief

__all__ = ["FEATURES", "OddsBelief", "learn_edge_odds", "paying_rows"]

ROWS = {"cpu": compiled.paying_rows, "reference": reference.paying_rows}
LEARN = {"cpu": compiled.learn_edge_odds, "reference": reference.learn_edge_odds}


def paying_rows(
    graph: TokenGraph,
    num_accepted: Tensor,
    belief: OddsBelief,
    seconds: Tensor | None,
    *,
    max_rows: int,
    max_path: int,
    teaches: float = 0.0,
    backend: str = "auto",
) -> Rows:
    """The rows of ``graph``, likeliest first, of which there are as many as bring the most tokens a second.

    The probability that a source gives is rarely how often it is right: a long context that recurs is right more often
    than it says, and where the step before brought many tokens the text is being repeated. A logistic model of
    :data:`~gsd_kernels.ops.row_budget.records.FEATURES` says how often an edge is right if the node before it is. Every
    edge has its share of what the edges before it leave, so a node's edges together are no likelier than it. Rows are
    those of :func:`gsd_kernels.flatten` by these odds (at least 1e-30), whose products along the rows are the tokens
    that a step is expected to bring.

    Args:
        graph: merged; a node's edges are in order, best first.
        num_accepted: int32 [B], tokens that the step before brought; less than 1 counts as 1.
        belief: of the model; its weights are used.
        seconds: float64 [n], of a step with 1 … n rows of every sequence, n at least 1; there are no more rows then.
            ``None``: all rows.
        max_rows, max_path: see :func:`gsd_kernels.flatten`.
        teaches: tokens of later steps that a row brings.
        backend: see :mod:`gsd_kernels.backends`.

    Returns:
        :class:`~gsd_kernels.Rows` whose scores are logarithms of the odds; of equal counts the fewest.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range.
    """
    device = graph.token_ids.device
    check_tensor("num_accepted", num_accepted, (graph.token_ids.shape[0],), (torch.int32,), device)
    _check(belief, device)
    if seconds is not None:
        check_tensor("seconds", seconds, (None,), (torch.float64,), device)
        if seconds.shape[0] < 1:
            raise ValueError("seconds: expected those of one row at least, got none")
    check_limits(max_rows, max_path)
    function = resolve_without_triton(backend, device, ROWS)
    return function(graph, num_accepted, belief, seconds, max_rows, max_path, teaches)


def learn_edge_odds(
    graph: TokenGraph,
    num_accepted: Tensor,
    nodes: Tensor,
    picked: Tensor,
    belief: OddsBelief,
    *,
    drift: float = 0.0,
    backend: str = "auto",
) -> OddsBelief:
    """The belief after a step, by the target's picks after accepted nodes: of each, from its edges up to the right one.

    Of edges without a row too, since the pick says which of them was right. Every edge is an observation of a logistic
    regression, by one step of an extended Kalman filter (Fahrmeir, 1992, "Posterior mode estimation by extended Kalman
    filtering for multivariate dynamic generalized linear models").

    Args:
        graph, num_accepted: as :func:`paying_rows` had them.
        nodes: int32 [B, P], of the accepted path; −2 beyond it.
        picked: int32 [B, P], the target's token after each.
        belief: before the step; stays as it is.
        drift: by which share of its prior variance a weight wanders with every observation.
        backend: see :mod:`gsd_kernels.backends`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range.
    """
    device, batch = graph.token_ids.device, graph.token_ids.shape[0]
    check_tensor("num_accepted", num_accepted, (batch,), (torch.int32,), device)
    check_tensor("nodes", nodes, (batch, None), (torch.int32,), device)
    check_tensor("picked", picked, tuple(nodes.shape), (torch.int32,), device)
    _check(belief, device)
    if not (math.isfinite(drift) and drift >= 0.0):
        raise ValueError(f"drift: expected a finite number of at least 0, got {drift}")
    return resolve_without_triton(backend, device, LEARN)(graph, num_accepted, nodes, picked, belief, drift)


def _check(belief: OddsBelief, device: torch.device) -> None:
    for name, shape in (("weights", (FEATURES,)), ("covariance", (FEATURES, FEATURES)), ("prior", (FEATURES,))):
        check_tensor(f"belief.{name}", getattr(belief, name), shape, (torch.float64,), device)
