"""Automatic shapes: the one with the most predicted tokens a second, with every step as evidence.

Shapes come from a :mod:`ladder <gsd_kernels_hf.policy.shapes>`, tokens from :mod:`acceptance
<gsd_kernels_hf.policy.acceptance>`, seconds from :mod:`costs <gsd_kernels_hf.costs.model>`. A generation begins with
the shape that the last one ended with, or with the most promising one that speculates. A shape whose cost is uncertain
is tried for two steps where the tokens to come are expected to pay for them. So is plain decoding, which is never
chosen before it was timed, unless steps emit one token anyhow. Where it is best, speculation is off, and tried again
later; likewise the draft model where shapes without it are best.

The first step behind a long prompt is plain where a draft model has to read the prompt too: the first token comes
before that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from gsd_kernels import GraphConfig
from gsd_kernels.config import PLAIN

from .. import numbers
from ..costs.model import OBSERVATION_STD, CostModel
from .acceptance import AcceptanceModel, TreeForecast, kind_of
from .base import Observation, Plan
from .experience import MAX_CHOICE_INTERVAL_STEPS, MIN_TOKENS_PER_STEP, Experience, LearningPolicy, logger, mean_of
from .fixed import FixedPolicy
from .settings import Automatic
from .shapes import BRANCH

TRIAL_STEPS, TRIAL_PAUSE_STEPS = 2, 8  # length of a trial; steps before the first, and between two
TRIAL_TOKENS = 1.0  # that a trial must be worth beside its steps: other storage, cold caches
KNOWN_CHOICE_STEPS = 10  # until the first choice, where an earlier call's shape goes on
# A text is taken to be another than the last one when at least so many tokens beyond one a step were predicted, and at
# most this share of them was accepted.
NEW_TEXT_MIN_TOKENS, NEW_TEXT_MAX_SHARE = 5.0, 0.25
REMEMBERED_BATCH_SIZES = 8  # of which the last shape is kept


class ShapeExperience(Experience):
    """The experience of generations whose shapes are chosen.

    Args:
        costs, settings: see :class:`Experience`.
        shapes: of the ladder, by name; a subset of those that ``costs`` knows.
    """

    first_wait = 64

    def __init__(self, costs: CostModel, shapes: Mapping[str, GraphConfig], settings: Automatic | None = None) -> None:
        super().__init__(costs, settings)
        self.shapes = dict(shapes)
        self.acceptance = AcceptanceModel(BRANCH)
        self.forecast = TreeForecast(list(self.shapes.values()), BRANCH)
        self.last: dict[str, str] = {}  # batch size → shape that the last generation ended with

    def as_dict(self) -> dict[str, Any]:
        """All but the costs, for the disk."""
        return {"acceptance": self.acceptance.as_dict(), "last": self.last, **super().as_dict()}

    def load(self, data: Mapping[str, Any]) -> None:
        """Load what :meth:`as_dict` gave; see :meth:`Experience.load`."""
        last, acceptance = numbers.table("last", data["last"], str), AcceptanceModel(BRANCH)
        if not set(last.values()) <= self.costs.index.keys():
            raise ValueError("last: of other shapes")
        acceptance.load(data["acceptance"])
        super().load(data)
        self.last, self.acceptance = last, acceptance


class ShapePolicy(LearningPolicy):
    """The shape with the most predicted tokens a second.

    A generation is in one of five states:

    ========  ===========================================  =========================================================
    opening   ``return_to`` before any choice              one plain step, while a draft model has a long prompt to read
    settled   ``current`` is the best shape known          learn and choose at ``next_choice``
    trial     ``return_to`` is the settled shape           ``TRIAL_STEPS`` of a shape of uncertain cost
    off       ``current`` is 0, plain decoding             ``experience.wait`` steps until a retry
    retry     ``before_retry`` is the shape before         ``retry_steps`` of a shape whose sources were not seen
    ========  ===========================================  =========================================================

    Args:
        experience, batch, prefix, saver: see :class:`LearningPolicy`.
        reads_prompt: whether a source reads all of the prompt before it proposes.
    """

    def __init__(
        self,
        experience: ShapeExperience,
        *,
        batch: int = 1,
        prefix: int = 0,
        reads_prompt: bool = False,
        saver: Any = None,
    ) -> None:
        super().__init__(experience, batch, prefix, saver)
        self.acceptance: AcceptanceModel | None = experience.acceptance
        self.names = (PLAIN, *experience.shapes)
        self.configs: tuple[GraphConfig | None, ...] = (None, *experience.shapes.values())
        self.of_costs = np.array([experience.costs.index[name] for name in self.names])
        self.kinds = tuple(dict.fromkeys(kind_of(shape) for shape in experience.shapes.values()))
        self.return_to: int | None = None  # the shape behind a trial, or behind the opening step; else None
        self.before_retry: int | None = None  # the shape before a retry, until its first choice
        self.chosen = False  # whether a choice was made
        self.next_trial = TRIAL_PAUSE_STEPS  # step of the next trial of a shape, at the earliest
        self.current, self.next_choice = self._first()
        self.off = self.current == 0  # whether speculation is off, but for trials
        first = self.configs[self.current]
        long = prefix >= self.settings.long_prompt_tokens
        if reads_prompt and long and first is not None and first.depth > 0:
            self.return_to, self.current = self.current, 0

    def _first(self) -> tuple[int, int]:
        """The first step's shape, and when to choose."""
        last, experience = self.experience.last.get(str(self.batch)), self.experience
        self._predict()
        if last in self.names:
            if self._unseen(self.names.index(last)):  # which a new text may suit better
                experience.wait = min(experience.wait, KNOWN_CHOICE_STEPS)
            return self.names.index(last), KNOWN_CHOICE_STEPS
        # No generation of this batch size was seen: a shape with all sources is safe, and plain decoding is never
        # chosen by a prior.
        drafted = [i for i, shape in enumerate(self.configs) if shape is not None and shape.depth]
        some = drafted or range(1, len(self.names))
        return max(some, key=self._rates(self.expected).__getitem__), self.settings.first_choice_steps

    def shape(self) -> GraphConfig | None:
        """The shape of the next step."""
        return self.configs[self.current]

    def plan(self) -> Plan:
        """The next step, with all rows: a shape is also how many levels are drafted, which rows do not choose."""
        return Plan(self.shape(), self.acceptance)

    def largest_shapes(self) -> list[GraphConfig]:
        """All of the ladder."""
        return list(self.experience.shapes.values())

    def observe(self, seen: Observation) -> None:
        """Note a step; now and then learn from those noted, and choose anew."""
        if seen.late:  # of the shape before, which was learned from
            self.cached += sum(seen.tokens)
            return
        self._note(seen)
        if self.return_to is not None and not self.chosen:  # go on as if the generation began here
            self._learn()
            self.current, self.return_to = self.return_to, None
            self.steps = self.since = 0
            return
        if self.return_to is None and self._unseen(self.current):
            self.experience.wait = max(0, self.experience.wait - 1)
        another = self._another_text()
        if another:
            self.experience.acceptance.forget()
        if another or self.steps >= self.next_choice:
            self.next_choice = self.steps + self._interval(self.settings.first_choice_steps)
            self._learn()
            self._choose(timed=seen.target_seconds > 0)

    def _another_text(self) -> bool:
        """Return whether the first steps, of the shape that an earlier text ended with, emit far less than there."""
        if len(self.kinds) == 1 or self.chosen:
            return False  # with one kind of shapes there is no other to go to
        predicted = self.steps * (self.expected[self.current] - 1.0)  # tokens beyond one a step
        accepted = sum(max(mean_of(step.tokens) - 1.0, 0.0) for step in self.log)
        return predicted >= NEW_TEXT_MIN_TOKENS and accepted <= NEW_TEXT_MAX_SHARE * predicted

    def _learn(self) -> None:
        """Learn from the steps since the last choice; several at once, while this is in the cache."""
        config, model = self.configs[self.current], self.experience.acceptance
        pools: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        for step in self.log:
            for pool, profile in step.profiles.items():
                pools.setdefault(pool, []).append(profile)
            if config is not None and (tokens := mean_of(step.tokens)):
                model.observe_accepted(kind_of(config), tokens - 1.0, self.expected[self.current])
        for pool, profile in pools.items():
            probs, hits = (np.concatenate(parts) for parts in zip(*profile, strict=True))
            model.observe(pool, probs, hits, steps=len(profile))
        name = self.names[self.current]
        for step in self._later_steps(name):
            self._observe(name, step, OBSERVATION_STD)

    def end(self) -> None:
        """Keep what was learned, and where the generation ended."""
        settled = next(shape for shape in (self.before_retry, self.return_to, self.current) if shape is not None)
        last = {batch: name for batch, name in self.experience.last.items() if batch != str(self.batch)}
        last[str(self.batch)] = self.names[settled]
        self.experience.last = dict([*last.items()][-REMEMBERED_BATCH_SIZES:])
        super().end()

    def without_model(self, *, reuses: bool) -> FixedPolicy:
        """The best of the shapes without a model's levels, or plain decoding."""
        self.end()
        some = [i for i, shape in enumerate(self.configs) if shape is None or (reuses and not shape.depth)]
        return FixedPolicy(self.configs[max(some, key=self._rates(self.expected).__getitem__)])

    def _predict(self) -> None:
        """Tokens and rows that a step of every shape would have now, of one sequence."""
        predicted = self.experience.acceptance.tokens(self.experience.forecast)
        self.expected, self.rows = (np.append(1.0, values) for values in predicted)

    def _seconds(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        costs = self.experience.costs
        return costs.target_seconds(self.batch * rows, self.cached), costs.other_seconds(self.batch)[self.of_costs]

    def _rates(self, tokens: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """Tokens a second of a sequence, by shape; with the rows that were predicted last, or others."""
        return tokens / sum(self._seconds(self.rows if rows is None else rows))

    def _spread(self, home: int) -> np.ndarray:
        """Standard deviations of the log seconds of every shape over those of ``home``."""
        costs, (target, other) = self.experience.costs, self._seconds(self.rows)
        rows = costs.target_weights(self.batch * self.rows, self.cached)
        besides = costs.other_weights(self.of_costs, self.batch)
        stds = target * costs.target.std(rows - rows[home]) + other * costs.other.std(besides - besides[home])
        return stds / (target + other)

    def _unseen(self, shape: int) -> list[str]:
        """Source kinds whose acceptance cannot be observed while ``shape`` runs.

        All of them under plain decoding, the draft model under shapes without its levels.
        """
        config = self.configs[shape]
        shown = [] if config is None else ["lookup"] if config.depth == 0 else ["model", "lookup"]
        return [kind for kind in self.kinds if kind not in shown]

    def _choose(self, *, timed: bool) -> None:
        """Choose the shape of the next steps: the best one, a trial, or one of what was switched off."""
        experience, self.chosen = self.experience, True
        if self.current == 0 and self.return_to is None:
            self._retry()
            return
        self._predict()
        self.before_retry = None
        rates = self._rates(self.expected)
        home = self.current if self.return_to is None else self.return_to
        if self.return_to is not None:
            # Home again before anything is taken: the machine may have become another during the trial.
            self.return_to, self.next_choice = None, self.steps + TRIAL_STEPS
            self._take(home, self.current, rates)
            return
        if self.since > experience.first_wait and not self._unseen(home):
            experience.next_wait = experience.first_wait  # speculation pays
        best = self._most_promising(rates, home)
        known = experience.costs.timed.get(PLAIN, 0) >= TRIAL_STEPS
        if rates[0] > rates[best] and (known or self.expected[best] < MIN_TOKENS_PER_STEP):
            best = 0
        if rates[home] * self.settings.min_gain >= rates[best]:
            best = home
        self._take(best, home, rates)
        if len(self._unseen(best)) > len(self._unseen(home)):
            experience.give_up()
        elif best and self._unseen(best) and experience.wait == 0:
            self._retry()
        elif best and timed and self.steps >= (self.next_trial if known else TRIAL_PAUSE_STEPS):
            self._try(rates, best)

    def _most_promising(self, rates: np.ndarray, home: int) -> int:
        """The speculating shape with the most tokens a second.

        Steps of a shape without the draft model show nothing of it. Such a shape must exceed the best of those that
        show as much as ``home`` does by a standard deviation of what is known of its kind.
        """
        best = 1 + int(rates[1:].argmax())
        config, shown = self.configs[best], len(self._unseen(home))
        if config is None or len(self._unseen(best)) <= shown:
            return best
        margin = self.experience.acceptance.evidence(kind_of(config)) ** -0.5
        some = [i for i in range(1, len(self.names)) if len(self._unseen(i)) <= shown]
        other = max(some, key=rates.__getitem__)
        return best if rates[best] > (1.0 + margin) * rates[other] else other

    def _take(self, shape: int, before: int, rates: np.ndarray) -> None:
        """Give the next steps to ``shape`` in place of ``before``, because of their tokens a second; log a switch."""
        off = shape == 0 and self.return_to is None
        if off != self.off or shape != self.current:
            kind = "trial" if self.return_to is not None else "switch"
            logger.log(
                logging.DEBUG if off == self.off else logging.INFO,
                "auto: %s after %d steps: %s has %.1f tokens/s by %.2f tokens a step, %s %.1f by %.2f",
                kind if off == self.off else "speculation off" if off else "speculation on",
                self.steps,
                *(self.names[shape], rates[shape], self.expected[shape]),
                *(self.names[before], rates[before], self.expected[before]),
            )
        if shape != self.current:
            self.since = 0
        self.current, self.off = shape, off

    def _try(self, rates: np.ndarray, home: int) -> None:
        """Give a few steps to the shape of uncertain cost from which the tokens to come gain most, if any do."""
        spread, normal = np.maximum(self._spread(home), 1e-9), NormalDist()
        # A shape is taken if its log rate x exceeds that of ``home`` by min_gain. Of x ~ N(mean, spread²) the expected
        # excess is spread · (φ(z) + z · Φ(z)), z = mean / spread.
        standard = np.log(rates / (self.settings.min_gain * rates[home])) / spread
        gains = spread * [normal.pdf(z) + z * normal.cdf(z) for z in standard]
        lost = TRIAL_TOKENS + TRIAL_STEPS * self.expected * np.maximum(rates[home] / rates - 1.0, 0.0)
        worth = self.settings.payback_tokens * gains - lost
        worth[home] = 0.0
        shape = int(worth.argmax()) if self.steps >= self.next_trial else 0
        if worth[shape] > 0.0:
            self.return_to = home
            self._take(shape, home, rates)
            self.next_choice = self.steps + TRIAL_STEPS
            self.next_trial = self.next_choice + TRIAL_PAUSE_STEPS

    def _retry(self) -> None:
        """Try again what was off for long, speculation or the draft model, where an easy text could make it pay."""
        experience, acceptance = self.experience, self.experience.acceptance
        if experience.wait > 0:
            self.next_choice = self.steps + min(MAX_CHOICE_INTERVAL_STEPS, experience.wait)
            return
        unseen = self._unseen(self.current)
        easy = acceptance.easy_tokens(experience.forecast, unseen)
        rates = self._rates(*(np.append(1.0, values) for values in easy))
        some = [i for i, config in enumerate(self.configs) if config is not None and kind_of(config) in unseen]
        some = [i for i in some if rates[i] >= self.settings.min_gain * rates[self.current]]
        if not some:
            experience.wait = experience.next_wait
            return
        best = min(some, key=lambda i: (len(self._unseen(i)), -float(rates[i])))  # what shows most
        for kind in unseen:
            if kind not in self._unseen(best):
                acceptance.assume_easy(kind)
        self._predict()
        self.before_retry = self.current
        self._take(best, self.current, rates)
        self.next_choice = self.steps + self.settings.retry_steps
