"""How long what was switched off stays so before it is tried again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PATIENCE, MOST_PATIENCE = 64, 1024  # plain steps until speculation is tried again
RETRY_STEPS = 5  # of a trial
NOTHING = 1.1  # tokens a step, below which speculation brings nothing, whatever it costs


class Patience:
    """Steps to wait, twice as many after every trial in vain; what is learned of a pair has it.

    Args:
        patience: steps to wait the first time.

    Attributes:
        wait: steps until the next trial.
        patience: what ``wait`` will be when something is given up.
    """

    def __init__(self, patience: int = PATIENCE) -> None:
        self.wait, self.patience = 0, patience

    def give_up(self) -> None:
        """Wait from now on, and longer the next time."""
        self.wait = self.patience
        self.patience = min(2 * self.patience, MOST_PATIENCE)

    def as_dict(self) -> dict[str, Any]:
        """Both, for the disk."""
        return {"wait": self.wait, "patience": self.patience}


def kept(data: Mapping[str, Any]) -> tuple[int, int]:
    """``wait`` and ``patience`` of what :meth:`Patience.as_dict` gave.

    Raises:
        ValueError, KeyError, TypeError: it is not that.
    """
    wait, patience = int(data["wait"]), int(data["patience"])
    if not 1 <= patience <= MOST_PATIENCE or wait < 0:
        raise ValueError("experience: values out of range")
    return wait, patience
