from __future__ import annotations

from typing import Any

from ..table import Op
from . import reference


def stored(*arguments: Any) -> tuple[Any, ...]:
    """The window, which comes last, as the operators take it."""
    *rest, window = arguments
    return (*rest, window.state, window.keys, window.updates, window.sums, window.block)


state_rows = Op(
    "state_rows(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta, Tensor parents, Tensor depths, "
    "Tensor lengths, Tensor state, Tensor(a!) keys, Tensor(b!) updates, Tensor(c!) sums, int block) -> Tensor",
    reference.state_rows,
    ranked=("cpu",),
    flat=stored,
    tolerance=2e-5,
)
state_commit = Op(
    "state_commit(Tensor accepted_rows, Tensor num_accepted, Tensor lengths, Tensor(a!) state, Tensor(b!) keys, "
    "Tensor(c!) updates, Tensor(d!) sums, int block) -> ()",
    reference.state_commit,
    ranked=("cpu",),
    flat=stored,
    tolerance=2e-5,
)
