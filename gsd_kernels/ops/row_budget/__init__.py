"""The rows of a graph that are worth their time, by odds that are learned from every step."""

from .api import learn_edge_odds, paying_rows
from .records import FEATURES, OddsBelief

__all__ = ["FEATURES", "OddsBelief", "learn_edge_odds", "paying_rows"]
