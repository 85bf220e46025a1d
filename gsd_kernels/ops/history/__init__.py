"""Tokens that may follow a node, by all that is remembered of its text: one mixture over every source's candidates."""

from .api import history_append, history_recall
from .records import WEIGHTS, Recollection

__all__ = ["WEIGHTS", "Recollection", "history_append", "history_recall"]
