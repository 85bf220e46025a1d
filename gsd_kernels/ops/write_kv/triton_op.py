"""The Triton cache write as an opaque operator. Importing this imports no triton."""

from __future__ import annotations

from typing import Any

from ...compiled import no_result, schema_of
from ..launching import launching_op


@launching_op("gsd_kernels::triton_write_kv", mutates_args=("k_cache", "v_cache"), schema=schema_of("write_kv"))
def write_kv(*arguments: Any) -> None:
    """Keys and values in one launch."""
    from .triton import write_kv as launch

    launch(*arguments)


write_kv.register_fake(no_result)
