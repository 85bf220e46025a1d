"""Matrices of weights that stay packed: their formats, and the dense rows that they stand for."""

from . import codes, halves
from .api import unpack_rows
from .kinds import BY_NAME, CODE_KINDS, KINDS, ROUNDED_KINDS, ROUNDING_KINDS, Kind
from .matrix import PackedMatrix
from .pack import PACKERS, pack_matrix

__all__ = [
    "BY_NAME",
    "CODE_KINDS",
    "KINDS",
    "PACKERS",
    "ROUNDED_KINDS",
    "ROUNDING_KINDS",
    "Kind",
    "PackedMatrix",
    "codes",
    "halves",
    "pack_matrix",
    "unpack_rows",
]
