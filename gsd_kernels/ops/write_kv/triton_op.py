"""The Triton cache write as an opaque operator. Importing this imports no triton."""

from __future__ import annotations

from torch import Tensor

from ...compiled import no_result
from ..launching import launching_op


@launching_op("gsd_kernels::triton_write_kv", mutates_args=("k_cache", "v_cache"))
def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
    """Keys and values in one launch."""
    from .triton import write_kv as launch

    launch(k_cache, v_cache, k, v, positions)


write_kv.register_fake(no_result)
