"""A drafter's forward over graph rows as one operator: a decoder that reads a feature a row."""

from .api import feature_rows
from .weights import FeatureWeights, Projection

__all__ = ["FeatureWeights", "Projection", "feature_rows"]
