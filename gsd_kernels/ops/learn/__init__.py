"""Interpolation weights of draft sources, learned from what the target picked."""

from .api import learn_source
from .records import Asked, Mixture

__all__ = ["Asked", "Mixture", "learn_source"]
