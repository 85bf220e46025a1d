"""Recurrent layers over rows: a state at a fixed position of the text, and the tokens since."""

from .api import state_commit, state_rows
from .window import BLOCK, StateWindow

__all__ = ["BLOCK", "StateWindow", "state_commit", "state_rows"]
