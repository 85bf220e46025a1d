from __future__ import annotations

from torch import Tensor

from ..table import Op
from . import reference
from .records import Recollection, Seen

__all__ = ["history_append", "history_recall"]


def followed(known: Recollection, tokens: Tensor, counts: Tensor, seen: Seen | None) -> tuple[object, ...]:
    """The operator's lists: what is written, and what the target found likely."""
    return known.written(), tokens, counts, [] if seen is None else seen.tensors(), known.sizes


history_recall = Op(
    "history_recall(Tensor[] history, Tensor token_ids, Tensor parents, Tensor contexts, Tensor depths, Tensor nodes, "
    "int branch, int[] sizes, Tensor? first_pick, Tensor? seed, Tensor? sequence_ids) -> (Tensor, Tensor, Tensor)",
    reference.history_recall,
    ranked=("cpu", "cuda"),
    lacks=("triton",),
    flat=lambda known, graph, nodes, *noise: (
        *(known.tensors(), graph.token_ids, graph.parents, graph.contexts, graph.depths, nodes),
        *(graph.branch, known.sizes, *noise),
    ),
    tolerance=2e-5,
)
history_append = Op(
    "history_append(Tensor(a!)[] history, Tensor tokens, Tensor counts, Tensor[] seen, int[] sizes) -> ()",
    reference.history_append,
    ranked=("cpu", "cuda"),
    lacks=("triton",),
    flat=followed,
)
