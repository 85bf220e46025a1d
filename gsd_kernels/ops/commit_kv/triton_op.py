"""The Triton commit as an opaque operator. Importing this imports no triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...compiled import no_result, schema_of
from ..launching import launching_op


@launching_op(
    "gsd_kernels::triton_commit_kv", mutates_args=("k_caches", "v_caches", "kv_len"), schema=schema_of("commit_kv")
)
def _commit_kv(*arguments: Any) -> None:
    from .triton import commit_kv as launch

    launch(*arguments)


_commit_kv.register_fake(no_result)


def commit_kv(
    k_caches: Sequence[Tensor], v_caches: Sequence[Tensor], accepted_rows: Tensor, num_accepted: Tensor, kv_len: Tensor
) -> None:
    """All evenly spaced layers in one launch."""
    _commit_kv(list(k_caches), list(v_caches), accepted_rows, num_accepted, kv_len)
