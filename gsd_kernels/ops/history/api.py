"""On the CPU only: on a GPU a step is captured, and the history is the table alone (``ngram_recall``)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...backends import implementations_of, resolve_without_triton
from ...checks import check_tensor
from ...config import MAX_CONTEXT
from ...graph import TokenGraph
from ..ngram.api import check_noise
from . import compiled, reference
from .records import Recollection

__all__ = ["history_append", "history_recall"]

RECALL, APPEND = (
    implementations_of(op, cpu=compiled, reference=reference) for op in ("history_recall", "history_append")
)


def history_recall(
    known: Recollection,
    graph: TokenGraph,
    nodes: Tensor,
    *,
    first_pick: Tensor | None = None,
    seed: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest tokens after nodes of a graph, by all that is remembered.

    Candidates come from the contexts of 1 … 4 tokens that the table knows, from what followed the longest matches of
    the text itself (five tokens or more), from contexts of other texts, and after the root from what was nearly picked
    in its place. A log-linear mixture weighs them: a candidate's score is the sum of what every source that names it
    says, "none of them" has a score of its own, and the chances are their softmax. So a chance is how often such a
    candidate is right, whichever source it is from. :mod:`~gsd_kernels.ops.history.records` has the features.

    Args:
        known: of at least the graph's branch.
        graph: with the tokens before each node.
        nodes: int32 [B, W], −1 for padding, which is answered as the root.
        first_pick, seed, sequence_ids: as :func:`~gsd_kernels.ops.ngram.ngram_recall` takes them, all or none; the
            tables' candidates are weighed with the noise that the target will draw with.
        backend: see :mod:`gsd_kernels.backends`; there is no Triton kernel, ``"triton"`` takes what ``"auto"`` does.

    Returns:
        tokens int32 [B, W, K] (best first, −1 for none), log-probabilities float32 [B, W, K] (−∞ for none), and int32
        [B, W]: 0 where nothing is known, the length of the longest context, 5 for a match of five tokens or more, 6
        where only others than the text know something.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    check_recall(known, graph)
    device, batch = known.table.keys.device, known.table.keys.shape[0]
    check_tensor("nodes", nodes, (batch, None), (torch.int32,), device)
    check_noise(first_pick, seed, sequence_ids, batch, device)
    return resolve_without_triton(backend, device, RECALL)(
        known, graph, nodes, graph.branch, first_pick, seed, sequence_ids
    )


def check_recall(known: Recollection, graph: TokenGraph) -> None:
    """Raise unless a graph's nodes can be asked about."""
    device, batch = known.table.keys.device, known.table.keys.shape[0]
    check_tensor("graph.contexts", graph.contexts, (batch, None, MAX_CONTEXT), (torch.int32,), device)
    if graph.branch > known.table.tokens.shape[2]:
        raise ValueError(f"graph: expected a branch of at most {known.table.tokens.shape[2]}, got {graph.branch}")


def history_append(known: Recollection, tokens: Tensor, counts: Tensor, *, backend: str = "auto") -> None:
    """Append tokens to the text, in place; its room grows as they need it.

    Args:
        known: what they are appended to.
        tokens: int32 [B, M], −1 where no match may go across.
        counts: int32 [B], how many of each row.
        backend: see :mod:`gsd_kernels.backends`; there is no Triton kernel, ``"triton"`` takes what ``"auto"`` does.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    device, batch = known.text.device, known.text.shape[0]
    check_tensor("tokens", tokens, (batch, None), (torch.int32,), device)
    check_tensor("counts", counts, (batch,), (torch.int32,), device)
    known.reserve(tokens.shape[1])
    resolve_without_triton(backend, device, APPEND)(known, tokens, counts)
