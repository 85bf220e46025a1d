"""Move the accepted rows' keys and values to the end of the prefix."""

from .api import commit_kv

__all__ = ["commit_kv"]
