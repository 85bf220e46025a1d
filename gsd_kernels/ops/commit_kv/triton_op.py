"""The Triton commit as an opaque operator. Importing this imports no triton."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..launching import launching_op


@launching_op(
    "gsd_kernels::triton_commit_kv",
    mutates_args=("k_caches", "v_caches", "kv_len"),
    schema=(
        "(Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, Tensor accepted_rows, Tensor num_accepted, Tensor(c!) kv_len)"
        " -> ()"
    ),
)
def _commit_kv(
    k_caches: Sequence[Tensor], v_caches: Sequence[Tensor], accepted_rows: Tensor, num_accepted: Tensor, kv_len: Tensor
) -> None:
    from .triton import commit_kv as launch

    launch(k_caches, v_caches, accepted_rows, num_accepted, kv_len)


@_commit_kv.register_fake
def _(*_: object) -> None:
    return None


def commit_kv(
    k_caches: Sequence[Tensor], v_caches: Sequence[Tensor], accepted_rows: Tensor, num_accepted: Tensor, kv_len: Tensor
) -> None:
    """All evenly spaced layers in one launch."""
    _commit_kv(list(k_caches), list(v_caches), accepted_rows, num_accepted, kv_len)
