from __future__ import annotations

from torch import Tensor

from ..table import Op
from . import reference

WRITE = Op(
    "write_kv",
    "k_cache!:float[B,H,S,D] v_cache!:k_cache[B,H,S,V] k:k_cache[B,H,R,D] v:k_cache[B,H,R,V] positions:int64[B,R] "
    "spoiled?!:float32[B,R]",
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
    WRITE.line.check(k_cache, v_cache, k, v, positions, spoiled)
    WRITE(k_cache, v_cache, k, v, positions.contiguous(), spoiled, backend=backend)
