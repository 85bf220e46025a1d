from __future__ import annotations

import torch
from torch import Tensor

from ...backends import implementations_of, resolve
from ...checks import check_tensor
from . import compiled, reference
from .matrix import PackedMatrix

IMPLEMENTATIONS = implementations_of("unpack_rows", cpu=compiled, reference=reference)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def unpack_rows(
    matrix: PackedMatrix, rows: Tensor | None = None, *, dtype: torch.dtype, backend: str = "auto"
) -> Tensor:
    """Rows of the dense matrix that a packed one stands for: each weight in float32, rounded once.

    Formats of GGUF: ``dequantize`` of the ``gguf`` package gives the same bits.

    Args:
        matrix: packed.
        rows: int64 [n], which ones, in their order; ``None``: all.
        dtype: float32, bfloat16 or float16.
        backend: see :mod:`gsd_kernels.backends`.

    Returns:
        [n, inputs]

    Raises:
        TypeError, ValueError, RuntimeError: an argument has the wrong type, or a row is outside the matrix.
    """
    if dtype not in FLOATS:
        raise TypeError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
    if rows is not None:
        check_tensor("rows", rows, (None,), (torch.int64,), matrix.device)
    return resolve(backend, matrix.device, IMPLEMENTATIONS)(matrix, rows, dtype)
