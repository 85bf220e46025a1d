"""Attention of graph rows over the committed prefix and their own ancestors."""

from .api import dag_attention
from .reference import visibility

__all__ = ["dag_attention", "visibility"]
