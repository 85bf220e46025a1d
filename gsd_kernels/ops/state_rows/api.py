from __future__ import annotations

from typing import Any

from ..table import Op
from . import reference


def stored(*arguments: Any) -> tuple[Any, ...]:
    """The window, which comes last, as the operators take it."""
    *rest, window = arguments
    return (*rest, window.state, window.keys, window.updates, window.sums, window.block)


state_rows = Op(
    "state_rows",
    "query:float32[B,R,G,D] key:float32[B,R,G,D] value:float32[B,R,H,V] decay:float32[B,R,H,E] beta?:float32[B,R,H] "
    "parents[B,A] depths[B,A] lengths[B] state:float32[...] keys!:float32[...] updates!:float32[...] "
    "sums!:float32[...] block:int -> float32[B,R,H,V]",
    reference.state_rows,
    ranked=("cpu",),
    flat=stored,
    tolerance=2e-5,
)
state_commit = Op(
    "state_commit",
    "accepted_rows[B,P] num_accepted[B] lengths[B] state!:float32[...] keys!:float32[...] "
    "updates!:float32[...] sums!:float32[...] block:int",
    reference.state_commit,
    ranked=("cpu",),
    flat=stored,
    tolerance=2e-5,
)
