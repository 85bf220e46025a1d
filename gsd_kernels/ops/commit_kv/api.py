from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..table import Op
from . import reference

COMMIT = Op(
    "commit_kv",
    "k_caches!{ k_cache:any[B,H,S,D] ... } v_caches!{ v_cache:any[B,H,S,V] ... } "  # of the first layer
    "accepted_rows[B,P] num_accepted[B] kv_len![B]",
    reference.commit_kv,
)


def commit_kv(
    k_caches: Sequence[Tensor],
    v_caches: Sequence[Tensor],
    accepted_rows: Tensor,
    num_accepted: Tensor,
    kv_len: Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Append the accepted rows of every layer to the committed prefix, in place, and advance ``kv_len``.

    Row r of a sequence lies at cache position ``kv_len + r``; the i-th accepted row moves to ``kv_len + i``. All
    sources are read before anything is written, so the accepted rows may be in any order.

    Args:
        k_caches, v_caches: one tensor [B, Hkv, S, D] a layer, any strides with unit last dimension; the layers of one
            call share a device.
        accepted_rows: int32 [B, P], −1 padded.
        num_accepted: int32 [B].
        kv_len: int32 [B], advanced by ``num_accepted``. The caller keeps ``kv_len + rows ≤ S``: a CPU
            refuses other rows, a GPU leaves them where they are.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    if len(k_caches) != len(v_caches) or not k_caches:
        raise ValueError(f"v_caches: expected as many layers as k_caches and at least one, got {len(v_caches)}")
    COMMIT.checked(list(k_caches), list(v_caches), accepted_rows, num_accepted, kv_len, backend=backend)
