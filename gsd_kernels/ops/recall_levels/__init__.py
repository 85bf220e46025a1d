"""Grow the token graph by levels that the history alone drafts."""

from .api import recall_levels
from .records import RecalledLevels

__all__ = ["RecalledLevels", "recall_levels"]
