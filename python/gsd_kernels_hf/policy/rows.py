"""Automatic rows: one wide shape, of which every step forwards as many rows as pay; or none at all.

For sources without a draft model, where the host may decide how many rows a step has. What a step brings is known row
by row then (:mod:`budget <gsd_kernels_hf.policy.budget>`), so there is no shape to choose, and nothing to predict but
seconds (:mod:`costs <gsd_kernels_hf.policy.costs>`). Where plain decoding is faster, speculation is off, and tried
again later.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gsd_kernels import GraphConfig

from .acceptance import AcceptanceModel
from .base import Profiles
from .budget import EdgeOdds, RowBudget
from .costs import COLD, PLAIN, CostModel
from .patience import NOTHING, RETRY_STEPS, Patience, kept

GAIN = 1.02  # plain decoding, as slow as it may be, must have this much more tokens a second
FIRST_CHOICE, KNOWN_CHOICE = 2, 8  # steps until the first choice; of a pair that ran before
INTERVAL = 16  # steps between choices, at most
SETTLED = 16  # steps of a text until speculation may be off
PATIENCE = 16  # plain steps until it is tried again, at first: where little is forwarded, little is lost
KNOWN_WAIT = 10  # plain steps of a new text until it is tried again, at most
YOUNG = 16  # timed steps of a pair, until which doubtful counts of rows are tried in all of them
HOPE = 0.75  # standard deviations by which they are taken to cost less
HOPES = 32  # how many steps apart, at most, doubtful counts of rows are tried
TOKENS, ROWS = 2.0, 8.0  # of a step, before any was taken
NOISE = 0.05, 0.2  # of one step's forward, in a pair's first steps and later: machines change within minutes, and what
# they do in one says little of the next
MEMORY = 0.97  # of what steps brought and took, a step
SLOW = 2.0  # times what steps took lately, as which a slower one counts
WEIGHT = 4.0  # steps that what was known before a text counts for


class _Step(NamedTuple):
    """Times of a step, and rows of all sequences."""

    rows: int
    target_seconds: float
    other_seconds: float


class RowExperience(Patience):
    """What generations of a pair learn, together: calls that overlap in time share it.

    Args:
        costs: of the pair, for any sources and sampling.
        name, shape: the shape whose rows are chosen; ``costs`` knows it.
    """

    def __init__(self, costs: CostModel, name: str, shape: GraphConfig) -> None:
        super().__init__(PATIENCE)
        self.costs, self.name, self.shape = costs, name, shape
        self.odds = EdgeOdds()
        self.tokens, self.rows = TOKENS, ROWS  # of a step that speculates, lately
        self.off = False
        self.warm: set[str] = set()  # shapes that ran in this process

    @property
    def known(self) -> bool:
        """Whether steps of the shape were timed before, in this process or another one."""
        return self.name in self.costs.tried

    def as_dict(self) -> dict[str, Any]:
        """All but the costs, for the disk."""
        return {
            "odds": self.odds.as_dict(),
            "tokens": self.tokens,
            "rows": self.rows,
            "off": self.off,
            **super().as_dict(),
        }

    def load(self, data: Mapping[str, Any]) -> None:
        """What :meth:`as_dict` gave.

        Raises:
            ValueError, KeyError, TypeError: it is not that; nothing was taken over.
        """
        tokens, rows, off = float(data["tokens"]), float(data["rows"]), bool(data["off"])
        wait, patience = kept(data)
        if not 1.0 <= tokens <= 1.0 + (self.shape.max_path or 0) or not 1.0 <= rows <= self.shape.max_rows:
            raise ValueError("experience: a step of which the shape is incapable")
        self.odds.load(data["odds"])
        self.tokens, self.rows, self.off, self.wait, self.patience = tokens, rows, off, wait, patience


class RowPolicy:
    """The rows that pay; see :class:`~gsd_kernels_hf.policy.base.Policy`.

    Args:
        experience: of the pair.
        batch: sequences.
        prefix: tokens of the prompt.
        saver: has ``save()``, called at the end.
    """

    def __init__(self, experience: RowExperience, *, batch: int = 1, prefix: int = 0, saver: Any = None) -> None:
        self.experience, self.batch, self.saver = experience, batch, saver
        self.acceptance: AcceptanceModel | None = None  # wants no profiles
        self.row_budget = RowBudget(experience.odds)
        self.budget: RowBudget | None = self.row_budget
        self.counts = np.arange(1.0, 1.0 + experience.shape.max_rows)  # of rows
        self.cached = float(batch * prefix)  # tokens in the target's cache, all sequences together
        self.off = experience.off
        if self.off:  # a new text may be easier
            experience.wait = min(experience.wait, KNOWN_WAIT)
        self.steps = self.since = 0  # of the text, and since speculation was switched on or off
        self.least = KNOWN_CHOICE if experience.known else FIRST_CHOICE  # steps between choices
        self.next_choice, self.next_hope, self.settles = self.least, 0, SETTLED
        self.noted: list[_Step] = []  # since the last choice
        self._predict()
        self._begin()
        self._set_seconds()

    def _begin(self) -> None:
        """Expect steps as they were lately, until some were taken."""
        tokens, rows = (1.0, 1.0) if self.off else (self.experience.tokens, self.experience.rows)
        self.weight, self.brought, self.spent = WEIGHT, WEIGHT * tokens, WEIGHT * self._seconds(rows, self._name)

    @property
    def _name(self) -> str:
        return PLAIN if self.off else self.experience.name

    @property
    def _young(self) -> bool:
        """Whether so little of the pair is known that every step may try something."""
        return self.experience.costs.steps < YOUNG

    def _seconds(self, rows: float, name: str) -> float:
        """Of a step, as predicted."""
        forward = np.interp(rows, self.counts, self.forward)
        return float(forward + self.other[self.experience.costs.index[name]])

    def _predict(self) -> None:
        """What forwards of 1, 2, … rows take, and the rest of a plain step and of one that speculates."""
        costs = self.experience.costs
        self.forward = costs.target_seconds(self.batch * self.counts, self.cached)
        self.other = costs.other_seconds(self.batch)

    def _set_seconds(self) -> None:
        """Tell the budget what steps take; now and then, for one step, if rows cost as little as may well be."""
        if self.off:
            return
        costs = self.experience.costs
        other = self.other[costs.index[self._name]]
        self.seconds = self.row_budget.seconds = torch.from_numpy(self.forward + other)
        if self.steps >= self.next_hope or self._young:
            self.next_hope = self.steps + min(HOPES, max(INTERVAL // 2, costs.steps // 4))
            self.row_budget.seconds = torch.from_numpy(self.forward * np.exp(-HOPE * self._doubts()) + other)

    def _doubts(self) -> np.ndarray:
        """Of 1, 2, … rows: standard deviations of a forward's log seconds, against the best known of them."""
        weights = self.experience.costs.target_weights(self.batch * self.counts, self.cached)
        spread = self.experience.costs.target.spread
        return spread(weights - weights[spread(weights).argmin()])

    def shape(self) -> GraphConfig | None:
        """The wide one, or ``None`` while speculation is off."""
        return None if self.off else self.experience.shape

    def largest_shapes(self) -> list[GraphConfig]:
        """The wide one."""
        return [self.experience.shape]

    def observe(
        self,
        profiles: Profiles,
        tokens: Sequence[int],
        *,
        rows: int,
        target_seconds: float = 0.0,
        other_seconds: float = 0.0,
    ) -> None:
        """Note a step; now and then learn from those noted, and choose anew."""
        self.noted.append(_Step(self.batch * rows, target_seconds, other_seconds))
        going = [count for count in tokens if count > 0]
        if going:
            brought, experience = sum(going) / len(going), self.experience
            if target_seconds > 0:
                usual = self.spent / self.weight
                self.weight = MEMORY * self.weight + 1.0
                self.brought = MEMORY * self.brought + brought
                self.spent = MEMORY * self.spent + min(target_seconds + other_seconds, SLOW * usual)
            if not self.off:
                experience.tokens += (1.0 - MEMORY) * (brought - experience.tokens)
                experience.rows += (1.0 - MEMORY) * (rows - experience.rows)
        self.cached += sum(tokens)
        self.steps += 1
        self.since += 1
        if self.off:
            self.experience.wait = max(0, self.experience.wait - 1)
        if self.steps >= self.next_choice:
            self.next_choice = self.steps + min(INTERVAL, max(self.least, self.steps // 2))
            self._learn()
            self._predict()
            self._choose()
            self._set_seconds()
        elif len(self.noted) == 1 and not self.off and not self._young:
            self.row_budget.seconds = self.seconds

    def _learn(self) -> None:
        """Take in the seconds of the steps since the last choice, all with speculation or all without.

        Steps of as many rows are one, the median: what is learned of each costs a decoder time.
        """
        experience, name = self.experience, self._name
        if not self.noted:
            return
        if name not in experience.warm:
            experience.warm.add(name)
            first = self.noted.pop(0)
            seconds = first.target_seconds, first.other_seconds
            experience.costs.observe(name, first.rows, self.cached, self.batch, *seconds, noise=COLD)
        alike: dict[int, list[float]] = {}
        for step in self.noted:
            if step.target_seconds > 0:
                alike.setdefault(step.rows, []).append(step.target_seconds)
        if alike:
            seconds = [statistics.median(some) for some in alike.values()]
            noise = min(NOISE[0] * math.sqrt(1.0 + experience.costs.steps / YOUNG), NOISE[1])
            noises = [noise / len(some) ** 0.5 for some in alike.values()]
            steps = sum(map(len, alike.values()))
            experience.costs.observe_forwards(name, list(alike), self.cached, seconds, noises, steps=steps)
        others = [step.other_seconds for step in self.noted if step.other_seconds > 0]
        if others:
            experience.costs.observe(name, self.batch, self.cached, self.batch, 0.0, statistics.median(others))
        self.noted.clear()

    def _choose(self) -> None:
        """Switch speculation off where plain decoding is faster, and on again after a while."""
        experience = self.experience
        if self.off:
            self.next_choice = min(self.next_choice, self.steps + experience.wait)
            if experience.wait == 0:
                self._switch(off=False)
            return
        if self.since > PATIENCE:
            experience.patience = PATIENCE  # speculation pays
        plain = self._seconds(1.0, PLAIN)
        if self.since >= self.settles and self.spent > GAIN * plain * self.brought:
            # By a guess never, unless steps bring one token anyhow.
            doubt = float(self._doubts()[0]) if self.brought > NOTHING * self.weight else 0.0
            if self.spent > GAIN * plain * math.exp(doubt) * self.brought:
                experience.give_up()
                self._switch(off=True)

    def _switch(self, *, off: bool) -> None:
        """Speculation off or on."""
        self.off, self.since, self.settles = off, 0, RETRY_STEPS
        self.next_choice = self.steps + min(INTERVAL, self.experience.wait if off else RETRY_STEPS)
        self._begin()

    def without_model(self, *, reuses: bool) -> RowPolicy:
        """Itself: it has no model."""
        return self

    def end(self) -> None:
        """Keep what was learned."""
        self._learn()
        self.experience.off = self.off
        if self.saver is not None:
            self.saver.save()
