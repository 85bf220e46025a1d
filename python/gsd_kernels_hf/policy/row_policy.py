"""Automatic rows: one wide shape, of which every step forwards the rows with the most tokens a second; or none at all.

For sources without a draft model, where the host may decide how many rows a step has. Expected tokens are known row by
row then (:mod:`row_selector <gsd_kernels_hf.policy.row_selector>`), so there is no shape to choose, and nothing to
predict but seconds (:mod:`costs <gsd_kernels_hf.costs.model>`). Where plain decoding is faster, speculation is off, and
tried again later.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gsd_kernels import GraphConfig
from gsd_kernels.config import PLAIN

from .. import numbers
from ..costs.model import CostModel
from .acceptance import AcceptanceModel
from .base import Observation, Plan
from .experience import MAX_CHOICE_INTERVAL_STEPS, MIN_TOKENS_PER_STEP, Experience, LearningPolicy, logger, mean_of
from .row_selector import EdgeModel, RowSelector
from .settings import Automatic

MIN_STEPS_BEFORE_OFF = 16  # of a text
NEW_TEXT_MAX_WAIT_STEPS = 10  # plain steps of a new text until speculation is tried again
KNOWN_CHOICE_STEPS = 8  # until the first choice of a pair that ran before
EXPLORE_STEPS = 16  # timed steps of a pair, in each of which row counts of uncertain cost are tried
MAX_EXPLORE_INTERVAL_STEPS = 32  # between such trials later
OPTIMISM_STD = 0.75  # they are tried as if their log seconds were so many standard deviations lower
INITIAL_TOKENS, INITIAL_ROWS = 2.0, 8.0  # means of a step before any was taken
DECAY_PER_STEP = 0.97  # weight of all earlier steps in running means, after one step more
PRIOR_STEPS = 4.0  # that the means known before a text count for
OUTLIER_CAP = 2.0  # a step slower than this multiple of the running mean is counted as this multiple
MIN_DISTURBANCE = 1.1  # steps slower by this factor than they are predicted to be are taken to be disturbed
# Noise of one forward, log seconds: in a pair's first steps, and later. Machines change within minutes, so that one
# step says little of the next.
MIN_NOISE_STD, MAX_NOISE_STD = 0.05, 0.2


class RowExperience(Experience):
    """The experience of generations whose rows are chosen.

    Args:
        costs, settings: see :class:`Experience`.
        name, shape: the shape whose rows are chosen; ``costs`` knows it.
    """

    def __init__(self, costs: CostModel, name: str, shape: GraphConfig, settings: Automatic | None = None) -> None:
        super().__init__(costs, settings)
        self.name, self.shape = name, shape
        self.edges = EdgeModel()
        self.tokens, self.rows = INITIAL_TOKENS, INITIAL_ROWS  # running means of a step
        self.off = False

    @property
    def known(self) -> bool:
        """Return whether steps of the shape were timed before, in this process or another one."""
        return self.name in self.costs.timed

    def as_dict(self) -> dict[str, Any]:
        """All but the costs, for the disk."""
        means = {"tokens": self.tokens, "rows": self.rows, "off": self.off}
        return {"edges": self.edges.as_dict(), **means, **super().as_dict()}

    def load(self, data: Mapping[str, Any]) -> None:
        """Load what :meth:`as_dict` gave; see :meth:`Experience.load`."""
        tokens = numbers.number("tokens", data["tokens"], 1.0, 1.0 + (self.shape.max_path or 0))
        rows = numbers.number("rows", data["rows"], 1.0, self.shape.max_rows)
        off, edges = numbers.flag("off", data["off"]), EdgeModel()
        edges.load(data["edges"])
        super().load(data)
        self.edges.posterior, self.tokens, self.rows, self.off = edges.posterior, tokens, rows, off


class RowPolicy(LearningPolicy):
    """One wide shape and a choice of its rows, or plain steps.

    Args:
        experience, batch, prefix, saver: see :class:`LearningPolicy`.
        backend: of the ops.
    """

    acceptance: AcceptanceModel | None = None  # wants no profiles

    def __init__(
        self, experience: RowExperience, *, batch: int = 1, prefix: int = 0, backend: str = "auto", saver: Any = None
    ) -> None:
        super().__init__(experience, batch, prefix, saver)
        self.selector = RowSelector(experience.edges, backend)
        self.counts = np.arange(1.0, 1.0 + experience.shape.max_rows)  # of rows, [R]
        self.off = experience.off
        if self.off:  # a new text may be easier
            experience.wait = min(experience.wait, NEW_TEXT_MAX_WAIT_STEPS)
        # Steps between choices, at least.
        self.least = KNOWN_CHOICE_STEPS if experience.known else self.settings.first_choice_steps
        self.next_choice, self.next_trial, self.settles = self.least, 0, MIN_STEPS_BEFORE_OFF
        self._predict()
        self._restart_means()
        self._set_seconds()

    def _restart_means(self) -> None:
        """Expect steps as they were lately, until some were taken."""
        tokens, rows = (1.0, 1.0) if self.off else (self.experience.tokens, self.experience.rows)
        self.weight = PRIOR_STEPS  # of the sums of tokens, of seconds, and of steps by row count
        self.taken = self.weight * np.clip(1.0 - abs(self.counts - rows), 0.0, None)  # [R]
        self.forwards = float(self.taken @ self.forward)
        self.tokens, self.seconds = self.weight * tokens, self.weight * self._seconds(rows, self._name)

    @property
    def _name(self) -> str:
        return PLAIN if self.off else self.experience.name

    @property
    def _explores(self) -> bool:
        """Return whether so little of the pair's costs is known that every step tries row counts of uncertain cost."""
        return self.experience.costs.steps < EXPLORE_STEPS

    def _seconds(self, rows: float, name: str) -> float:
        """Predicted seconds of a step."""
        forward = np.interp(rows, self.counts, self.forward)
        return float(forward + self.other[self.experience.costs.index[name]])

    def _disturbance(self) -> float:
        """Factor by which the forwards of late were slower than they are predicted to be; 1 where they are as ever.

        Predictions are those of undisturbed steps, so steps that were taken are not compared with them before.
        """
        factor = self.forwards / float(self.taken @ self.forward)
        return factor if factor > MIN_DISTURBANCE else 1.0

    def _predict(self) -> None:
        """Predict seconds: of forwards of 1, 2, … rows, and of all else by name of the shape."""
        costs = self.experience.costs
        self.forward = costs.target_seconds(self.batch * self.counts, self.cached)  # [R]
        self.other = costs.other_seconds(self.batch)  # [names]

    def _set_seconds(self) -> None:
        """Tell the selector the seconds of a step by row count; now and then, for one step, optimistic ones."""
        if self.off:
            return
        costs = self.experience.costs
        other = self.other[costs.index[self._name]]
        self.by_rows = self.selector.seconds = torch.from_numpy(self.forward + other)
        if self.steps >= self.next_trial or self._explores:
            interval = max(MAX_CHOICE_INTERVAL_STEPS // 2, costs.steps // 4)
            self.next_trial = self.steps + min(MAX_EXPLORE_INTERVAL_STEPS, interval)
            optimistic = self.forward * np.exp(-OPTIMISM_STD * self._cost_std())
            self.selector.seconds = torch.from_numpy(optimistic + other)

    def _cost_std(self) -> np.ndarray:
        """Standard deviations of a forward's log seconds against the best known row count's, by row count: [R]."""
        weights = self.experience.costs.target_weights(self.batch * self.counts, self.cached)
        std = self.experience.costs.target.std
        return std(weights - weights[std(weights).argmin()])

    def shape(self) -> GraphConfig | None:
        """The wide one, or ``None`` while speculation is off."""
        return None if self.off else self.experience.shape

    def plan(self) -> Plan:
        """The next step: the wide shape and the choice of its rows, or plain decoding."""
        return Plan(self.shape(), rows=self.selector)

    def largest_shapes(self) -> list[GraphConfig]:
        """The wide one."""
        return [self.experience.shape]

    def observe(self, seen: Observation) -> None:
        """Learn which edges were right, and note the step; now and then learn from those noted, and choose anew."""
        if seen.verified is not None:
            self.selector.observe(seen.verified)
        self._note(seen)
        if tokens := mean_of(seen.tokens):
            self._average(tokens, seen)
        if self.off:
            self.experience.wait = max(0, self.experience.wait - 1)
        if self.steps >= self.next_choice:
            self.next_choice = self.steps + self._interval(self.least)
            self._learn()
            self._predict()
            self._choose()
            self._set_seconds()
        elif len(self.log) == 1 and not self.off and not self._explores:
            self.selector.seconds = self.by_rows

    def _average(self, tokens: float, seen: Observation) -> None:
        """Take a step into the running means of tokens, rows and seconds."""
        experience = self.experience
        if seen.target_seconds > 0:
            seconds = seen.target_seconds + seen.other_seconds
            counted = min(1.0, OUTLIER_CAP * self.seconds / self.weight / seconds)
            self.weight = DECAY_PER_STEP * self.weight + 1.0
            self.tokens = DECAY_PER_STEP * self.tokens + tokens
            self.seconds = DECAY_PER_STEP * self.seconds + counted * seconds
            self.forwards = DECAY_PER_STEP * self.forwards + counted * seen.target_seconds
            self.taken *= DECAY_PER_STEP
            self.taken[seen.rows - 1] += 1.0
        if not self.off:
            experience.tokens += (1.0 - DECAY_PER_STEP) * (tokens - experience.tokens)
            experience.rows += (1.0 - DECAY_PER_STEP) * (seen.rows - experience.rows)

    def _learn(self) -> None:
        name, costs = self._name, self.experience.costs
        steps = self._later_steps(name)
        noise = min(MIN_NOISE_STD * math.sqrt(1.0 + costs.steps / EXPLORE_STEPS), MAX_NOISE_STD)
        forwards = [(self.batch * step.rows, step.target_seconds) for step in steps if step.target_seconds > 0]
        costs.observe_period(name, forwards, self.cached, noise)
        if others := [step.other_seconds for step in steps if step.other_seconds > 0]:
            costs.observe(name, self.batch, self.cached, self.batch, 0.0, statistics.median(others))

    def _choose(self) -> None:
        """Switch speculation off where plain decoding is faster, and on again after a while."""
        experience, least = self.experience, self.settings.min_gain * self.tokens
        if self.off:
            self.next_choice = min(self.next_choice, self.steps + experience.wait)
            if experience.wait == 0:
                self._switch(off=False)
            return
        if self.since > experience.first_wait:
            experience.next_wait = experience.first_wait  # speculation pays
        plain = self._disturbance() * self._seconds(1.0, PLAIN)
        if self.since >= self.settles and self.seconds > least * plain:
            # Never by a prior alone, unless steps emit one token anyhow.
            useless = self.tokens <= MIN_TOKENS_PER_STEP * self.weight
            if useless or self.seconds > least * plain * np.exp(self._cost_std()[0]):
                experience.give_up()
                self._switch(off=True)

    def _switch(self, *, off: bool) -> None:
        """Speculation off or on."""
        logger.info(
            "auto: speculation %s after %d steps: %.1f tokens/s lately by %.2f tokens a step, plain has %.1f",
            "off" if off else "on",
            self.steps,
            self.tokens / self.seconds,
            self.tokens / self.weight,
            1.0 / (self._disturbance() * self._seconds(1.0, PLAIN)),
        )
        self.off, self.since, self.settles = off, 0, self.settings.retry_steps
        steps = self.experience.wait if off else self.settles
        self.next_choice = self.steps + min(MAX_CHOICE_INTERVAL_STEPS, steps)
        self._restart_means()

    def without_model(self, *, reuses: bool) -> RowPolicy:
        """Itself: it has no model."""
        return self

    def end(self) -> None:
        """Keep what was learned, and whether speculation is off."""
        self.experience.off = self.off
        super().end()
