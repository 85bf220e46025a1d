"""A linear layer over few rows."""

from .api import row_linear

__all__ = ["row_linear"]
