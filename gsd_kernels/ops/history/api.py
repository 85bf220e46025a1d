"""On the CPU only: on a GPU a step is captured, and the history is the table alone (``ngram_recall``)."""

from __future__ import annotations

from torch import Tensor

from ..table import Op
from . import reference
from .records import Recollection

__all__ = ["history_append", "history_recall"]


def appended(known: Recollection, tokens: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    """The index as the operator takes it, with room for the tokens."""
    known.reserve(tokens.shape[1])
    return known.text, known.length, known.heads, known.previous, tokens, counts


history_recall = Op(
    "history_recall(Tensor[] history, Tensor token_ids, Tensor parents, Tensor contexts, Tensor depths, Tensor nodes, "
    "int branch, int[] sizes, Tensor? first_pick, Tensor? seed, Tensor? sequence_ids) -> (Tensor, Tensor, Tensor)",
    reference.history_recall,
    ranked=("cpu",),
    lacks=("triton",),
    flat=lambda known, graph, nodes, *noise: (
        *(known.tensors(), graph.token_ids, graph.parents, graph.contexts, graph.depths, nodes),
        *(graph.branch, known.sizes, *noise),
    ),
    tolerance=2e-5,
)
history_append = Op(
    "history_append(Tensor(a!) text, Tensor(b!) length, Tensor(c!) heads, Tensor(d!) previous, Tensor tokens, "
    "Tensor counts) -> ()",
    reference.history_append,
    ranked=("cpu",),
    lacks=("triton",),
    flat=appended,
)
