"""Automatic rows: one wide shape, of which every step forwards the rows with the most tokens a second; or none at all.

For sources without a draft model, where the host may decide how many rows a step has. Expected tokens are known row by
row then (:mod:`row_selector <gsd_kernels_hf.policy.row_selector>`), so there is no shape to choose, and nothing to
predict but seconds (:mod:`costs <gsd_kernels_hf.costs.model>`). Where plain decoding is faster, speculation is off, and
tried again later.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from gsd_kernels import GraphConfig
from gsd_kernels.names import fields_named

from .. import numbers
from ..costs.model import PLAIN, CostModel
from .acceptance import AcceptanceModel
from .backoff import Backoff
from .base import Observation, Plan
from .row_selector import EdgeModel, RowSelector

logger = logging.getLogger("gsd_kernels")


@fields_named("RowSettings: unknown setting")
@dataclass(frozen=True)
class RowSettings:
    """Settings of a :class:`RowPolicy`. Steps are those of a generation unless it says a pair's.

    Attributes:
        min_gain: throughput of plain decoding over that of speculation, at least, to switch speculation off.
        min_tokens_per_step: mean below which speculation is useless whatever it costs, so that plain decoding need not
            have been timed.
        min_steps_before_off: steps of a text until speculation may be switched off.
        first_wait_steps: plain steps until it is tried again, the first time: where few rows are forwarded, little is
            lost.
        new_text_max_wait_steps: plain steps of a new text until it is tried again, at most.
        retry_steps: length of a trial.
        first_choice_steps, known_choice_steps: steps until the first choice, of a pair that is new, that ran before.
        max_choice_interval_steps: steps between choices, at most.
        explore_steps: timed steps of a pair during which row counts of uncertain cost are tried in every step.
        max_explore_interval_steps: steps between such trials later, at most.
        optimism_std: row counts of uncertain cost are tried as if their log seconds were this many standard deviations
            lower.
        initial_tokens, initial_rows: means of a step before any was taken.
        decay_per_step: weight of all earlier steps in running means, after one step more.
        prior_steps: number of steps that the means known before a text count for.
        outlier_cap: a step slower than this multiple of the running mean is counted as this multiple.
        min_disturbance: steps that are slower by this factor than they are predicted to be are taken to be disturbed.
        min_noise_std, max_noise_std: noise of one forward, log seconds: in a pair's first steps, and later. Machines
            change within minutes, so that one step says little of the next.
    """

    min_gain: float = 1.02
    min_tokens_per_step: float = 1.1
    min_steps_before_off: int = 16
    first_wait_steps: int = 16
    new_text_max_wait_steps: int = 10
    retry_steps: int = 5
    first_choice_steps: int = 2
    known_choice_steps: int = 8
    max_choice_interval_steps: int = 16
    explore_steps: int = 16
    max_explore_interval_steps: int = 32
    optimism_std: float = 0.75
    initial_tokens: float = 2.0
    initial_rows: float = 8.0
    decay_per_step: float = 0.97
    prior_steps: float = 4.0
    outlier_cap: float = 2.0
    min_disturbance: float = 1.1
    min_noise_std: float = 0.05
    max_noise_std: float = 0.2


class _Step(NamedTuple):
    """Seconds of a step, and rows of all sequences."""

    rows: int
    target_seconds: float
    other_seconds: float


class RowExperience(Backoff):
    """The experience of generations of a pair, together: calls that overlap in time share it.

    Args:
        costs: of the pair, for any sources and sampling.
        name, shape: the shape whose rows are chosen; ``costs`` knows it.
        settings: of its policies.
    """

    def __init__(self, costs: CostModel, name: str, shape: GraphConfig, settings: RowSettings | None = None) -> None:
        self.settings = settings or RowSettings()
        super().__init__(self.settings.first_wait_steps)
        self.costs, self.name, self.shape = costs, name, shape
        self.edges = EdgeModel()
        self.tokens, self.rows = self.settings.initial_tokens, self.settings.initial_rows  # running means of a step
        self.off = False
        self.warm: set[str] = set()  # shapes that ran since this was made

    @property
    def known(self) -> bool:
        """Return whether steps of the shape were timed before, in this process or another one."""
        return self.name in self.costs.timed

    def as_dict(self) -> dict[str, Any]:
        """All but the costs, for the disk."""
        return {
            "edges": self.edges.as_dict(),
            "tokens": self.tokens,
            "rows": self.rows,
            "off": self.off,
            **super().as_dict(),
        }

    def load(self, data: Mapping[str, Any]) -> None:
        """Load what :meth:`as_dict` gave.

        Raises:
            ValueError, KeyError, TypeError: it is not that; nothing was taken over.
        """
        tokens = numbers.number("tokens", data["tokens"], 1.0, 1.0 + (self.shape.max_path or 0))
        rows = numbers.number("rows", data["rows"], 1.0, self.shape.max_rows)
        off, (wait, next_wait) = numbers.flag("off", data["off"]), self.from_dict(data)
        self.edges.load(data["edges"])
        self.tokens, self.rows, self.off, self.wait, self.next_wait = tokens, rows, off, wait, next_wait


class RowPolicy:
    """One wide shape and a choice of its rows, or plain steps; see :class:`~gsd_kernels_hf.policy.base.Policy`.

    Args:
        experience: of the pair.
        batch: sequences.
        prefix: tokens of the prompt.
        backend: of the ops.
        saver: has ``save()``, called at the end.
    """

    def __init__(
        self,
        experience: RowExperience,
        *,
        batch: int = 1,
        prefix: int = 0,
        backend: str = "auto",
        saver: Any = None,
    ) -> None:
        self.experience, self.batch, self.saver = experience, batch, saver
        self.settings = settings = experience.settings
        self.acceptance: AcceptanceModel | None = None  # wants no profiles
        self.selector = RowSelector(experience.edges, backend)
        self.counts = np.arange(1.0, 1.0 + experience.shape.max_rows)  # of rows, [R]
        self.cached = float(batch * prefix)  # tokens in the target's cache, all sequences together
        self.off = experience.off
        if self.off:  # a new text may be easier
            experience.wait = min(experience.wait, settings.new_text_max_wait_steps)
        self.steps = self.since = 0  # of the text, and since speculation was switched on or off
        # Steps between choices, at least.
        self.least = settings.known_choice_steps if experience.known else settings.first_choice_steps
        self.next_choice, self.next_trial, self.settles = self.least, 0, settings.min_steps_before_off
        self.log: list[_Step] = []  # since the last choice
        self._predict()
        self._restart_means()
        self._set_seconds()

    def _restart_means(self) -> None:
        """Expect steps as they were lately, until some were taken."""
        tokens, rows = (1.0, 1.0) if self.off else (self.experience.tokens, self.experience.rows)
        self.weight = self.settings.prior_steps  # of the sums of tokens, of seconds, and of steps by row count
        self.taken = self.weight * np.clip(1.0 - abs(self.counts - rows), 0.0, None)  # [R]
        self.forwards = float(self.taken @ self.forward)
        self.tokens, self.seconds = self.weight * tokens, self.weight * self._seconds(rows, self._name)

    @property
    def _name(self) -> str:
        return PLAIN if self.off else self.experience.name

    @property
    def _explores(self) -> bool:
        """Return whether so little of the pair's costs is known that every step tries row counts of uncertain cost."""
        return self.experience.costs.steps < self.settings.explore_steps

    def _seconds(self, rows: float, name: str) -> float:
        """Predicted seconds of a step."""
        forward = np.interp(rows, self.counts, self.forward)
        return float(forward + self.other[self.experience.costs.index[name]])

    def _disturbance(self) -> float:
        """Factor by which the forwards of late were slower than they are predicted to be; 1 where they are as ever.

        Predictions are those of undisturbed steps, so steps that were taken are not compared with them before.
        """
        factor = self.forwards / float(self.taken @ self.forward)
        return factor if factor > self.settings.min_disturbance else 1.0

    def _predict(self) -> None:
        """Predict seconds: of forwards of 1, 2, … rows, and of all else by name of the shape."""
        costs = self.experience.costs
        self.forward = costs.target_seconds(self.batch * self.counts, self.cached)  # [R]
        self.other = costs.other_seconds(self.batch)  # [names]

    def _set_seconds(self) -> None:
        """Tell the selector the seconds of a step by row count; now and then, for one step, optimistic ones."""
        if self.off:
            return
        settings, costs = self.settings, self.experience.costs
        other = self.other[costs.index[self._name]]
        self.by_rows = self.selector.seconds = torch.from_numpy(self.forward + other)
        if self.steps >= self.next_trial or self._explores:
            interval = max(settings.max_choice_interval_steps // 2, costs.steps // 4)
            self.next_trial = self.steps + min(settings.max_explore_interval_steps, interval)
            optimistic = self.forward * np.exp(-settings.optimism_std * self._cost_std())
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
        self.log.append(_Step(self.batch * seen.rows, seen.target_seconds, seen.other_seconds))
        going = [count for count in seen.tokens if count > 0]
        if going:
            self._average(sum(going) / len(going), seen.rows, seen.target_seconds, seen.other_seconds)
        self.cached += sum(seen.tokens)
        self.steps += 1
        self.since += 1
        if self.off:
            self.experience.wait = max(0, self.experience.wait - 1)
        if self.steps >= self.next_choice:
            interval = min(self.settings.max_choice_interval_steps, max(self.least, self.steps // 2))
            self.next_choice = self.steps + interval
            self._learn()
            self._predict()
            self._choose()
            self._set_seconds()
        elif len(self.log) == 1 and not self.off and not self._explores:
            self.selector.seconds = self.by_rows

    def _average(self, tokens: float, rows: int, target_seconds: float, other_seconds: float) -> None:
        """Take a step into the running means of tokens, rows and seconds."""
        experience, decay = self.experience, self.settings.decay_per_step
        if target_seconds > 0:
            seconds = target_seconds + other_seconds
            counted = min(1.0, self.settings.outlier_cap * self.seconds / self.weight / seconds)
            self.weight = decay * self.weight + 1.0
            self.tokens = decay * self.tokens + tokens
            self.seconds = decay * self.seconds + counted * seconds
            self.forwards = decay * self.forwards + counted * target_seconds
            self.taken *= decay
            self.taken[rows - 1] += 1.0
        if not self.off:
            experience.tokens += (1.0 - decay) * (tokens - experience.tokens)
            experience.rows += (1.0 - decay) * (rows - experience.rows)

    def _learn(self) -> None:
        """Learn the seconds of the steps since the last choice, all with speculation or all without."""
        experience, settings, name = self.experience, self.settings, self._name
        if not self.log:
            return
        if name not in experience.warm:
            experience.warm.add(name)
            first = self.log.pop(0)
            seconds = first.target_seconds, first.other_seconds
            noise = experience.costs.settings.first_observation_std
            experience.costs.observe(name, first.rows, self.cached, self.batch, *seconds, noise=noise)
        growth = math.sqrt(1.0 + experience.costs.steps / settings.explore_steps)
        noise = min(settings.min_noise_std * growth, settings.max_noise_std)
        timed = [(step.rows, step.target_seconds) for step in self.log if step.target_seconds > 0]
        experience.costs.observe_period(name, timed, self.cached, noise)
        others = [step.other_seconds for step in self.log if step.other_seconds > 0]
        if others:
            experience.costs.observe(name, self.batch, self.cached, self.batch, 0.0, statistics.median(others))
        self.log.clear()

    def _choose(self) -> None:
        """Switch speculation off where plain decoding is faster, and on again after a while."""
        experience, settings = self.experience, self.settings
        if self.off:
            self.next_choice = min(self.next_choice, self.steps + experience.wait)
            if experience.wait == 0:
                self._switch(off=False)
            return
        if self.since > settings.first_wait_steps:
            experience.next_wait = settings.first_wait_steps  # speculation pays
        plain = self._disturbance() * self._seconds(1.0, PLAIN)
        if self.since >= self.settles and self.seconds > settings.min_gain * plain * self.tokens:
            # Never by a prior alone, unless steps emit one token anyhow.
            useless = self.tokens <= settings.min_tokens_per_step * self.weight
            std = 0.0 if useless else float(self._cost_std()[0])
            if self.seconds > settings.min_gain * plain * math.exp(std) * self.tokens:
                experience.give_up()
                self._switch(off=True)

    def _switch(self, *, off: bool) -> None:
        """Speculation off or on."""
        settings = self.settings
        logger.info(
            "auto: speculation %s after %d steps: %.1f tokens/s lately by %.2f tokens a step, plain has %.1f",
            "off" if off else "on",
            self.steps,
            self.tokens / self.seconds,
            self.tokens / self.weight,
            1.0 / (self._disturbance() * self._seconds(1.0, PLAIN)),
        )
        self.off, self.since, self.settles = off, 0, settings.retry_steps
        steps = self.experience.wait if off else settings.retry_steps
        self.next_choice = self.steps + min(settings.max_choice_interval_steps, steps)
        self._restart_means()

    def without_model(self, *, reuses: bool) -> RowPolicy:
        """Itself: it has no model."""
        return self

    def end(self) -> None:
        """Keep what was learned."""
        self._learn()
        self.experience.off = self.off
        if self.saver is not None:
            self.saver.save()
