"""Exponential backoff of what was switched off: speculation, or the draft model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import numbers

MAX_WAIT_STEPS = 1024


class Backoff:
    """Steps to wait before something that was switched off is tried again; every switching off doubles the next wait.

    The experience of a pair is a subclass, so that waits go on from generation to generation.

    Args:
        first_wait: steps, the first time.

    Attributes:
        wait: steps left until the next trial.
        next_wait: steps that :meth:`give_up` will set.
    """

    def __init__(self, first_wait: int) -> None:
        self.wait, self.next_wait = 0, first_wait

    def give_up(self) -> None:
        """Wait from now on, and twice as long the next time."""
        self.wait = self.next_wait
        self.next_wait = min(2 * self.next_wait, MAX_WAIT_STEPS)

    def as_dict(self) -> dict[str, Any]:
        """Both, for the disk."""
        return {"wait": self.wait, "next_wait": self.next_wait}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> tuple[int, int]:
        """``wait`` and ``next_wait`` of what :meth:`as_dict` gave.

        Raises:
            ValueError, KeyError, TypeError: it is not that.
        """
        wait = numbers.count("wait", data["wait"], most=MAX_WAIT_STEPS)
        return wait, numbers.count("next_wait", data["next_wait"], least=1, most=MAX_WAIT_STEPS)
