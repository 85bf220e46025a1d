"""Walk the rows along the target's own tokens."""

from .api import verify

__all__ = ["verify"]
