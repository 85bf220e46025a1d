"""Store graph rows' keys and values in their cache slots."""

from .api import write_kv

__all__ = ["write_kv"]
