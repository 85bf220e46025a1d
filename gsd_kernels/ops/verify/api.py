from __future__ import annotations

from torch import Tensor

from ...graph import Acceptance, Rows
from ..table import Op
from . import reference

VERIFY = Op(
    "verify",
    "token_ids[B,R] parent_rows[B,R] depths[B,R] ancestor_mask[B,R,R/32] num_rows[B] "
    "sampled[B,R] eos_ids[E] remaining[B] done:bool[B] max_path:int=D "
    "-> [B,D+1] [B] [B]",
    reference.verify,
    result=Acceptance,
)


def verify(
    rows: Rows,
    sampled: Tensor,
    *,
    eos_ids: Tensor,
    remaining: Tensor,
    done: Tensor,
    max_path: int,
    backend: str = "auto",
) -> Acceptance:
    """Accept the path on which every drafted token equals the target's own pick at its parent row.

    Args:
        rows: the verified rows.
        sampled: int32 [B, R], the token that the target picks after each row.
        eos_ids: int32 [E] (E may be 0); the walk ends with the first of these.
        remaining: int32 [B], tokens that may still be emitted (at least 1 unless done).
        done: bool [B], finished sequences accept nothing.
        max_path: depth of the deepest row.

    Returns:
        :class:`~gsd_kernels.Acceptance`. The step emits ``num_accepted`` tokens: those of the accepted rows without
        the root, then ``next_token``.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    tree = rows.token_ids, rows.parent_rows, rows.depths, rows.ancestor_mask, rows.num_rows
    return VERIFY.checked(*tree, sampled, eos_ids, remaining, done, max_path, backend=backend)
