"""Merge one drafted level into the token graph."""

from .api import merge

__all__ = ["merge"]
