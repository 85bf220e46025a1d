"""The Triton verify as an opaque operator. Importing this imports no triton."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...compiled import empty_acceptance, schema_of
from ...graph import Acceptance, Rows
from ..launching import launching_op


@launching_op("gsd_kernels::triton_verify", mutates_args=(), schema=schema_of("verify"))
def _verify(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    from .triton import verify as launch

    return launch(*arguments)


_verify.register_fake(empty_acceptance)


def verify(rows: Rows, sampled: Tensor, eos_ids: Tensor, remaining: Tensor, done: Tensor, max_path: int) -> Acceptance:
    """All rows at once, in one launch."""
    tree = (rows.token_ids, rows.parent_rows, rows.depths, rows.ancestor_mask, rows.num_rows)
    return Acceptance(*_verify(*tree, sampled, eos_ids, remaining, done, max_path))
