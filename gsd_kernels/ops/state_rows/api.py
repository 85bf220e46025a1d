from __future__ import annotations

from typing import Any

from ..table import Op
from . import reference


def stored(*arguments: Any) -> tuple[Any, ...]:
    """The window, which comes last, as the operators take it."""
    *rest, window = arguments
    return (*rest, window.state, window.keys, window.updates, window.sums, window.block)


WINDOW = "float32[2,B,H,D,V] keys!:float32[B,P,G,D] updates!:float32[B,P,H,V] sums!:float32[B,P,H,E] block:int=k"
"""Of lines."""

state_rows = Op(
    "state_rows",
    "query:float32[B,R,G,D] key:float32[B,R,G,D] value:float32[B,R,H,V] decay:float32[B,R,H,E] beta?:float32[B,R,H] "
    f"parents[B,A] depths[B,A] lengths[B] state:{WINDOW} -> float32[B,R,H,V]",
    reference.state_rows,
    ranked=("cpu",),
    flat=stored,
    tolerance=2e-5,
)
state_commit = Op(
    "state_commit",
    f"accepted_rows[B,A] num_accepted[B] lengths[B] state!:{WINDOW}",
    reference.state_commit,
    ranked=("cpu",),
    flat=stored,
    tolerance=2e-5,
)
