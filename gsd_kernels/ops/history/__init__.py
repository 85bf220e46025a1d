"""Tokens that may follow a node, by all that is remembered of its text: one mixture over every source's candidates."""

from .api import history_append, history_recall
from .records import WEIGHTS, Recollection, Seen

__all__ = ["WEIGHTS", "Recollection", "Seen", "history_append", "history_recall"]
