"""Attention of graph rows: the committed prefix and the nodes that a row's mask names."""

from .api import dag_attention
from .dense import DenseMask, dense_mask, visibility

__all__ = ["DenseMask", "dag_attention", "dense_mask", "visibility"]
