"""Unroll the token graph to rows, best path first."""

from .api import flatten

__all__ = ["flatten"]
