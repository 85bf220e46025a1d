from __future__ import annotations

import torch
from torch import Tensor

from ...checks import FLOATS, check_tensor
from ..table import Op
from . import reference

WRITE = Op(
    "write_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor positions, "
    "Tensor(c!)? spoiled=None) -> ()",
    reference.write_kv,
    ranked=("triton", "cpu"),
    dense=False,
)


def write_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    *,
    spoiled: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Store the rows of one layer at their cache positions, in place, every value finite.

    NaN becomes 0 and ±inf the dtype's largest values, as ``torch.nan_to_num`` has it: what overflows in one row must
    not reach rows that do not see it, and 0 · NaN would be NaN.

    Args:
        k_cache, v_cache: float [B, Hkv, S, D], any strides with unit last dimension; v may have its own D.
        k, v: the rows [B, Hkv, R, D], any strides.
        positions: int64 [B, R], distinct within a sequence. The caller keeps ``0 ≤ positions < S``.
        spoiled: float32 [B, R], gets NaN at rows with a key or value that is not finite, and stays as it is at others:
            what such a row and those that see it answer is NaN, which the cache no longer says.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    if not isinstance(k_cache, Tensor) or k_cache.dim() != 4:
        raise ValueError("k_cache: expected a tensor [batch, heads, positions, head_dim]")
    device, dtype, (batch, heads, slots, k_dim) = k_cache.device, (k_cache.dtype,), k_cache.shape
    check_tensor("k_cache", k_cache, (None, None, None, None), FLOATS, device)
    check_tensor("v_cache", v_cache, (batch, heads, slots, None), dtype, device)
    check_tensor("positions", positions, (batch, None), (torch.int64,), device)
    check_tensor("k", k, (batch, heads, positions.shape[1], k_dim), dtype, device)
    check_tensor("v", v, (batch, heads, positions.shape[1], v_cache.shape[3]), dtype, device)
    if spoiled is not None:
        check_tensor("spoiled", spoiled, positions.shape, (torch.float32,), device)
    WRITE(k_cache, v_cache, k, v, positions.contiguous(), spoiled, backend=backend)
