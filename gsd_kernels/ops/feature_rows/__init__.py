"""A drafter's forward over graph rows as one operator: a decoder whose first layer reads a feature a row."""

from .api import feature_rows
from .weights import FeatureWeights

__all__ = ["FeatureWeights", "feature_rows"]
