"""Interpolation weights of draft sources, learned from what the target picked."""

from .api import Asked, Mixture, learn_source

__all__ = ["Asked", "Mixture", "learn_source"]
