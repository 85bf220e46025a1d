"""Experience of a pair's generations, and the part of a policy that counts its steps and learns their seconds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .. import numbers
from ..costs.model import CostModel
from .base import Observation
from .settings import Automatic

logger = logging.getLogger("gsd_kernels")

MAX_WAIT_STEPS = 1024  # until what was switched off is tried again
MAX_CHOICE_INTERVAL_STEPS = 16  # between choices, at most
MIN_TOKENS_PER_STEP = 1.1  # below it speculation is useless whatever it costs: plain decoding need not have been timed
FIRST_STEP_STD = 0.7  # log seconds: of a shape's first step in a process, in which storage is made and code loaded


class Experience:
    """The experience of generations of a pair, together: calls that overlap in time share it.

    What was switched off, speculation or a draft model, is tried again after a wait, which doubles each time.

    Args:
        costs: of the pair, for any sources and sampling.
        settings: of its policies.

    Attributes:
        first_wait: steps, the first time.
        wait: steps left until the next trial of what is off.
        next_wait: steps that :meth:`give_up` will set.
        warm: names of shapes that ran since this was made.
    """

    first_wait = 16

    def __init__(self, costs: CostModel, settings: Automatic | None = None) -> None:
        self.costs, self.settings = costs, settings or Automatic()
        self.wait, self.next_wait = 0, self.first_wait
        self.warm: set[str] = set()

    def give_up(self) -> None:
        """Wait from now on, and twice as long the next time."""
        self.wait = self.next_wait
        self.next_wait = min(2 * self.next_wait, MAX_WAIT_STEPS)

    def as_dict(self) -> dict[str, Any]:
        """All but the costs, for the disk."""
        return {"wait": self.wait, "next_wait": self.next_wait}

    def load(self, data: Mapping[str, Any]) -> None:
        """Load what :meth:`as_dict` gave.

        Raises:
            ValueError, KeyError, TypeError: it is not that; nothing was taken over.
        """
        wait = numbers.count("wait", data["wait"], most=MAX_WAIT_STEPS)
        self.next_wait = numbers.count("next_wait", data["next_wait"], least=1, most=MAX_WAIT_STEPS)
        self.wait = wait


class LearningPolicy:
    """The part that automatic policies share; see :class:`~gsd_kernels_hf.policy.base.Policy`.

    Args:
        experience: of the pair.
        batch: sequences.
        prefix: tokens of the prompt.
        saver: has ``save()``, called at the end.

    Attributes:
        cached: tokens in the target's cache, all sequences together.
        steps, since: of the text, and since the last switch.
        log: steps since the last choice, all of one name.
    """

    def __init__(self, experience: Any, batch: int, prefix: int, saver: Any) -> None:
        self.experience, self.batch, self.saver = experience, batch, saver
        self.settings: Automatic = experience.settings
        self.cached = float(batch * prefix)
        self.steps = self.since = 0
        self.log: list[Observation] = []

    def _note(self, seen: Observation) -> None:
        """Note a step."""
        self.log.append(replace(seen, verified=None))  # which lives until the next step
        self.cached += sum(seen.tokens)
        self.steps += 1
        self.since += 1

    def _interval(self, least: int) -> int:
        """Steps until the next choice: more, the longer the text is."""
        return min(MAX_CHOICE_INTERVAL_STEPS, max(least, self.steps // 2))

    def _observe(self, name: str, step: Observation, noise: float) -> None:
        """Let the costs learn what a step of shape ``name`` took, for noise of so many log seconds."""
        seconds = step.target_seconds, step.other_seconds
        rows = self.batch * step.rows
        self.experience.costs.observe(name, rows, self.cached, self.batch, *seconds, noise=noise)

    def _later_steps(self, name: str) -> list[Observation]:
        """The steps since the last choice, all of shape ``name``, without its first in this process.

        There storage is made and code loaded: it is learned from for itself.
        """
        steps, self.log = self.log, []
        if steps and name not in self.experience.warm:
            self.experience.warm.add(name)
            self._observe(name, steps.pop(0), FIRST_STEP_STD)
        return steps

    def end(self) -> None:
        """Keep what was learned."""
        self._learn()
        if self.saver is not None:
            self.saver.save()

    def _learn(self) -> None:
        """Learn from the steps since the last choice."""
        raise NotImplementedError


def mean_of(tokens: Sequence[int]) -> float:
    """Tokens of a step, mean of the sequences that were not finished; 0 where all were."""
    going = [count for count in tokens if count > 0]
    return sum(going) / len(going) if going else 0.0
