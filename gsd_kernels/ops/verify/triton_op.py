"""The Triton verify as an opaque operator. Importing this imports no triton."""

from __future__ import annotations

from torch import Tensor

from ...graph import Acceptance, Rows
from ..launching import launching_op


@launching_op(
    "gsd_kernels::triton_verify",
    mutates_args=(),
    schema=(
        "(Tensor token_ids, Tensor parent_rows, Tensor depths, Tensor ancestor_mask, Tensor num_rows, "
        "Tensor sampled, Tensor eos_ids, Tensor remaining, Tensor done, int max_path) -> (Tensor, Tensor, Tensor)"
    ),
)
def _verify(
    token_ids: Tensor,
    parent_rows: Tensor,
    depths: Tensor,
    ancestor_mask: Tensor,
    num_rows: Tensor,
    sampled: Tensor,
    eos_ids: Tensor,
    remaining: Tensor,
    done: Tensor,
    max_path: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from .triton import verify as launch

    return launch(token_ids, parent_rows, depths, ancestor_mask, num_rows, sampled, eos_ids, remaining, done, max_path)


@_verify.register_fake
def _(token_ids: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    batch = token_ids.shape[0]
    return token_ids.new_empty(batch, rest[-1] + 1), token_ids.new_empty(batch), token_ids.new_empty(batch)


def verify(rows: Rows, sampled: Tensor, eos_ids: Tensor, remaining: Tensor, done: Tensor, max_path: int) -> Acceptance:
    """All rows at once, in one launch."""
    return Acceptance(
        *_verify(
            rows.token_ids,
            rows.parent_rows,
            rows.depths,
            rows.ancestor_mask,
            rows.num_rows,
            sampled,
            eos_ids,
            remaining,
            done,
            max_path,
        )
    )
