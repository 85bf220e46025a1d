"""Products with rows that are rounded to eight bits, as libraries define them that quantise activations.

Sums of codes (:data:`~.kinds.CODE_KINDS`) are exact, so a product has the bits of the library's own, at every level of
instructions. Where a library puts floats in the place of the codes again (:data:`~.kinds.ROUNDED_KINDS`), a product is
that of those floats and the dense matrix.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .api import unpack_rows
from .matrix import PackedMatrix

EPSILON = 2.0**-23  # of float32: the least scale


def linear(x: Tensor, matrix: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """x · weightᵀ for a matrix of a kind in :data:`LINEARS`, in a model of ``dtype``.

    […, inputs] → float32 […, outputs]. The result is not rounded to ``dtype`` yet; a bias comes before.
    """
    rows = x.reshape(-1, matrix.inputs).to(dtype)
    return LINEARS[matrix.kind.name](rows, matrix).view(*x.shape[:-1], matrix.outputs)


def dynamic(x: Tensor, matrix: PackedMatrix) -> Tensor:
    """torchao's Int8DynamicActivationInt8WeightConfig, symmetric, with a scale for each row.

    Of torchao 0.18: choose_qparams_affine, quantize_affine, and the linear function of Int8Tensor.
    """
    assert matrix.scales is not None  # as of every matrix of codes
    scale = (x.abs().amax(-1, keepdim=True) / 127.5).clamp(min=EPSILON).float()  # [rows, 1], rounded to the dtype of x
    codes = (x.float() * (1.0 / scale)).round().clamp(-128, 127)
    sums = (codes.double() @ matrix.data.double().T).float()  # exact in float64, rounded once
    return (sums * scale).to(x.dtype).float() * matrix.scales.view(-1)


def vectorwise(x: Tensor, matrix: PackedMatrix) -> Tensor:
    """bitsandbytes' LLM.int8 without outliers (a threshold of 0): codes of a row and of an output, 127 for the largest.

    Of bitsandbytes 0.50: int8_vectorwise_quant of the row in float16, int8_scaled_mm, int8_mm_dequant.
    """
    assert matrix.scales is not None  # as of every matrix of codes
    halves = x.half().float()
    most = halves.abs().amax(-1, keepdim=True)  # [rows, 1]
    codes = (halves * (most.reciprocal() * 127.0)).round().nan_to_num(0.0)  # a row of zeros, or not of finite ones
    sums = (codes.double() @ matrix.data.double().T).float()  # exact in float64, rounded once
    return sums * (most * matrix.scales.view(-1)) * 6.200124e-05


def rounded_rows(x: Tensor) -> Tensor:
    """compressed-tensors' fake quantisation of a token, symmetric, eight bits: […, inputs] → the same, in its dtype.

    Of compressed-tensors 0.20: calculate_qparams, _quantize_dequantize.
    """
    scale = x.abs().amax(-1, keepdim=True) / 127.5  # […, 1], rounded to the dtype of x as every step is
    scale = torch.where(scale == 0, torch.finfo(x.dtype).eps, scale)
    return (x / scale).clamp(-128, 127).round() * scale


def rounded(x: Tensor, matrix: PackedMatrix) -> Tensor:
    """The product of :func:`rounded_rows` and the dense matrix."""
    dense = unpack_rows(matrix, dtype=x.dtype, backend="reference")
    return rounded_rows(x).float() @ dense.float().T


LINEARS: dict[str, Callable[[Tensor, PackedMatrix], Tensor]] = {
    "int8_dynamic": dynamic,
    "int8_vectorwise": vectorwise,
    "int8_rounded": rounded,
}
"""By names of kinds: rows [n, inputs] in the model's dtype → float32 [n, outputs]."""
