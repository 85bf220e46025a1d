"""Statistics of draft sources, learned from what the target picked."""

from .api import Asked, Mixture, Reliability, learn_source

__all__ = ["Asked", "Mixture", "Reliability", "learn_source"]
