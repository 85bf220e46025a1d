"""Matrices of weights that stay packed: their formats, and the dense rows that they stand for."""

from .api import unpack_rows
from .kinds import BY_NAME, KINDS, Kind
from .matrix import PackedMatrix

__all__ = ["BY_NAME", "KINDS", "Kind", "PackedMatrix", "unpack_rows"]
