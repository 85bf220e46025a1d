"""The rows of a graph with the most expected tokens a second, by edge probabilities learned from every step."""

from .api import select_rows, update_edge_model
from .records import FEATURES, LogisticPosterior

__all__ = ["FEATURES", "LogisticPosterior", "select_rows", "update_edge_model"]
