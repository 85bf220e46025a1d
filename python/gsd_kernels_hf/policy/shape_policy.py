"""Automatic shapes: the one with the most predicted tokens a second, with every step as evidence.

Shapes come from a :mod:`ladder <gsd_kernels_hf.policy.shapes>`, tokens from :mod:`acceptance
<gsd_kernels_hf.policy.acceptance>`, seconds from :mod:`costs <gsd_kernels_hf.costs.model>`. A generation begins with
the shape that the last one ended with, or with the most promising one that speculates. A shape whose cost is uncertain
and that would be best if it were cheap is tried for two steps, as long as trials have cost little. So is plain
decoding, which is never chosen before it was timed, unless steps emit one token anyhow. Where it is best, speculation
is off, and tried again later; likewise the draft model where shapes without it are best.

The first step behind a long prompt is plain where a draft model has to read the prompt too: the first token comes
before that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gsd_kernels import GraphConfig
from gsd_kernels.names import fields_named

from .. import numbers
from ..costs.model import PLAIN, CostModel
from .acceptance import AcceptanceModel, TreeForecast, kind_of
from .backoff import Backoff
from .base import Observation, Plan, Profiles
from .fixed import FixedPolicy
from .shapes import BRANCH

logger = logging.getLogger("gsd_kernels")


@fields_named("ShapeSettings: unknown setting")
@dataclass(frozen=True)
class ShapeSettings:
    """Settings of a :class:`ShapePolicy`. Gains are ratios of throughput, tokens a second; steps are a generation's.

    Attributes:
        min_gain: of a new shape over the current one, at least, to be taken.
        unseen_gain_stds: a shape that shows less (none of the draft model's candidates) must be better by this many
            standard deviations of what shapes of its kind emit.
        trial_min_gain: of a shape of uncertain cost over the current one, if it is as cheap as one standard deviation
            allows, at least, to be tried.
        trial_steps: length of such a trial.
        first_trial_steps: steps before the first trial.
        trial_pause_steps: steps until a shape is tried again.
        max_trial_time_share: of the seconds of a generation, lost in trials.
        first_choice_steps, known_choice_steps: steps until the first choice, of a new pair, where an earlier call's
            shape goes on.
        max_choice_interval_steps: steps between choices, at most.
        retry_steps: length of a trial of what was switched off.
        first_wait_steps: plain steps until speculation is tried again, the first time.
        min_tokens_per_step: prediction below which speculation is useless whatever it costs, so that plain decoding
            need not have been timed.
        new_text_min_tokens, new_text_max_share: the text is taken to be another than the last one when at least so many
            tokens beyond one a step were predicted and at most this share of them was accepted.
        long_prompt_tokens: prompts from which on even a small draft model reads for longer than a plain step takes.
        remembered_batch_sizes: of which the last shape is kept.
    """

    min_gain: float = 1.02
    unseen_gain_stds: float = 1.0
    trial_min_gain: float = 1.05
    trial_steps: int = 2
    first_trial_steps: int = 8
    trial_pause_steps: int = 16
    max_trial_time_share: float = 0.02
    first_choice_steps: int = 2
    known_choice_steps: int = 10
    max_choice_interval_steps: int = 16
    retry_steps: int = 5
    first_wait_steps: int = 64
    min_tokens_per_step: float = 1.1
    new_text_min_tokens: float = 5.0
    new_text_max_share: float = 0.25
    long_prompt_tokens: int = 512
    remembered_batch_sizes: int = 8


class _Step(NamedTuple):
    """A step as it was observed; tokens of the sequences that were not finished, and those cached before it."""

    profiles: Profiles
    tokens: list[int]
    rows: int
    cached: float
    target_seconds: float
    other_seconds: float


class ShapeExperience(Backoff):
    """The experience of generations of a pair, together: calls that overlap in time share it.

    Args:
        costs: of the pair, for any sources and sampling.
        shapes: of the ladder, by name; a subset of those that ``costs`` knows.
        settings: of its policies.
    """

    def __init__(
        self, costs: CostModel, shapes: Mapping[str, GraphConfig], settings: ShapeSettings | None = None
    ) -> None:
        self.settings = settings or ShapeSettings()
        super().__init__(self.settings.first_wait_steps)
        self.costs = costs
        self.shapes = dict(shapes)
        self.acceptance = AcceptanceModel(BRANCH)
        self.forecast = TreeForecast(list(self.shapes.values()), BRANCH)
        self.predicted: tuple[np.ndarray, np.ndarray] | None = None  # tokens and rows of the last choice's prediction
        self.last: dict[str, str] = {}  # batch size → shape that the last generation ended with
        self.warm: set[str] = set()  # shapes that ran since this was made

    def as_dict(self) -> dict[str, Any]:
        """All but the costs, for the disk."""
        return {"acceptance": self.acceptance.as_dict(), "last": self.last, **super().as_dict()}

    def load(self, data: Mapping[str, Any]) -> None:
        """Load what :meth:`as_dict` gave.

        Raises:
            ValueError, KeyError, TypeError: it is not that; nothing was taken over.
        """
        last = numbers.table("last", data["last"], str)
        if not set(last.values()) <= self.costs.index.keys():
            raise ValueError("last: of other shapes")
        wait, next_wait = self.from_dict(data)
        self.acceptance.load(data["acceptance"])
        self.last = dict([*last.items()][-self.settings.remembered_batch_sizes :])
        self.wait, self.next_wait = wait, next_wait
        self.predicted = None

    def keep(self, batch: int, name: str) -> None:
        """Remember where a generation ended."""
        last = {b: n for b, n in self.last.items() if b != str(batch)}
        self.last = dict([*last.items(), (str(batch), name)][-self.settings.remembered_batch_sizes :])


class ShapePolicy:
    """The shape with the most predicted tokens a second; see :class:`~gsd_kernels_hf.policy.base.Policy`.

    A generation is in one of five states:

    ========  ===========================================  =========================================================
    opening   ``in_opening``                               one plain step, while a draft model has a long prompt to read
    settled   ``current`` is the best shape known          learn and choose at ``next_choice``
    trial     ``return_to`` is the settled shape           ``trial_steps`` of a shape of uncertain cost
    off       ``current`` is 0, plain decoding             ``experience.wait`` steps until a retry
    retry     ``before_retry`` is the shape before         ``retry_steps`` of a shape whose sources were not seen
    ========  ===========================================  =========================================================

    Args:
        experience: of the pair.
        batch: sequences.
        prefix: tokens of the prompt.
        reads_prompt: whether a source reads all of the prompt before it proposes.
        saver: has ``save()``, called at the end.
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
        self.experience, self.batch, self.saver = experience, batch, saver
        self.settings = experience.settings
        self.acceptance: AcceptanceModel | None = experience.acceptance
        self.names = (PLAIN, *experience.shapes)
        self.configs: tuple[GraphConfig | None, ...] = (None, *experience.shapes.values())
        self.of_costs = np.array([experience.costs.index[name] for name in self.names])
        self.kinds = tuple(dict.fromkeys(kind_of(shape) for shape in experience.shapes.values()))
        self.cached = float(batch * prefix)  # tokens in the target's cache, all sequences together
        self.steps = 0
        self.since = 0  # steps of the current shape
        self.tried: dict[int, int] = {}  # shape → step of its last trial
        self.log: list[_Step] = []  # since the last choice
        self.return_to: int | None = None  # the shape behind a trial, or behind the opening step; else None
        self.before_retry: int | None = None  # the shape before a retry, until its first choice
        self.resumed_at: int | None = None  # step of the last retry of speculation, until it is off, or has paid
        self.timed = False  # whether the last step's times were known
        self.elapsed = self.lost = self.trial_seconds = 0.0
        self.expected = self.rows = np.ones(len(self.names))  # predicted tokens and rows of a step, by shape
        self.current, self.next_choice = self._first()
        self.off = self.current == 0  # whether speculation is off, but for trials
        first = self.configs[self.current]
        long = prefix >= self.settings.long_prompt_tokens
        self.in_opening = reads_prompt and long and first is not None and first.depth > 0
        if self.in_opening:
            self.return_to, self.current = self.current, 0

    def _first(self) -> tuple[int, int]:
        """The first step's shape, and when to choose."""
        last, settings = self.experience.last.get(str(self.batch)), self.settings
        if last in self.names and self.experience.predicted is not None:
            self.expected, self.rows = self.experience.predicted  # the first choice is not made by them
        else:
            self._predict()
        if last in self.names:
            if self._unseen(self.names.index(last)):  # which a new text may suit better
                self.experience.wait = min(self.experience.wait, settings.known_choice_steps)
            return self.names.index(last), settings.known_choice_steps
        # No generation of this batch size was seen: a shape with all sources is safe, and plain decoding is never
        # chosen by a prior.
        drafted = [i for i, shape in enumerate(self.configs) if shape is not None and shape.depth]
        some = np.array(drafted or range(1, len(self.names)))
        return int(some[self._rates(self.expected)[some].argmax()]), settings.first_choice_steps

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
        going = [count for count in seen.tokens if count > 0]
        seconds = seen.target_seconds, seen.other_seconds
        self.log.append(_Step(seen.profiles, going, seen.rows, self.cached, *seconds))
        self.timed = seen.target_seconds > 0
        self.elapsed += sum(seconds)
        self.trial_seconds += sum(seconds) if self.return_to is not None else 0.0
        self.cached += sum(seen.tokens)
        self.steps += 1
        self.since += 1
        if self.in_opening:
            self._end_opening()
            return
        if self.return_to is None and self._unseen(self.current):
            self.experience.wait = max(0, self.experience.wait - 1)
        another = self._another_text()
        if another:
            self.experience.acceptance.forget()
        if another or self.steps >= self.next_choice:
            settings = self.settings
            interval = max(settings.first_choice_steps, self.steps // 2)
            self.next_choice = self.steps + min(settings.max_choice_interval_steps, interval)
            self._learn()
            self._choose()

    def _end_opening(self) -> None:
        """Go on, after the first step, as if the generation began here."""
        assert self.return_to is not None
        self._learn()
        self.current, self.return_to, self.in_opening = self.return_to, None, False
        self.steps, self.since, self.elapsed, self.trial_seconds = 0, 0, 0.0, 0.0

    def _another_text(self) -> bool:
        """Return whether the first steps, of the shape that an earlier text ended with, emit far less than there."""
        if len(self.kinds) == 1 or self.steps != len(self.log) or self.steps >= self.next_choice:
            return False  # with one kind of shapes there is no other to go to
        predicted = self.steps * (self.expected[self.current] - 1.0)  # tokens beyond one a step
        accepted = sum(sum(step.tokens) / max(len(step.tokens), 1) - 1.0 for step in self.log)
        settings = self.settings
        return predicted >= settings.new_text_min_tokens and accepted <= settings.new_text_max_share * predicted

    def _learn(self) -> None:
        """Learn from the steps since the last choice, all of one shape; several at once, while this is in the cache."""
        experience, name, config = self.experience, self.names[self.current], self.configs[self.current]
        noises = experience.costs.settings
        pools: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        for step in self.log:
            for pool, profile in step.profiles.items():
                pools.setdefault(pool, []).append(profile)
            if config is not None and step.tokens:
                accepted = sum(step.tokens) / len(step.tokens) - 1.0
                experience.acceptance.observe_accepted(kind_of(config), accepted, self.expected[self.current])
            noise = noises.observation_std if name in experience.warm else noises.first_observation_std
            experience.warm.add(name)
            rows = self.batch * step.rows
            seconds = step.target_seconds, step.other_seconds
            experience.costs.observe(name, rows, step.cached, self.batch, *seconds, noise=noise)
        for pool, profile in pools.items():
            probs, hits = (np.concatenate(parts) for parts in zip(*profile, strict=True))
            experience.acceptance.observe(pool, probs, hits, steps=len(profile))
        self.log.clear()

    def end(self) -> None:
        """Keep what was learned."""
        self._learn()
        settled = next(shape for shape in (self.before_retry, self.return_to, self.current) if shape is not None)
        self.experience.keep(self.batch, self.names[settled])
        if self.saver is not None:
            self.saver.save()

    def without_model(self, *, reuses: bool) -> FixedPolicy:
        """The best of the shapes without a model's levels, or plain decoding."""
        self.end()
        some = [i for i, shape in enumerate(self.configs) if shape is None or (reuses and not shape.depth)]
        return FixedPolicy(self.configs[max(some, key=self._rates(self.expected).__getitem__)])

    def _predict(self) -> None:
        """Tokens and rows that a step of every shape would have now, of one sequence."""
        predicted = self.experience.acceptance.tokens(self.experience.forecast)
        self.expected, self.rows = (np.concatenate([[1.0], values]) for values in predicted)
        self.experience.predicted = self.expected, self.rows

    def _seconds(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        costs = self.experience.costs
        return costs.target_seconds(self.batch * rows, self.cached), costs.other_seconds(self.batch)[self.of_costs]

    def _rates(self, tokens: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """Tokens a second of a sequence, by shape; with the rows that were predicted last, or others."""
        target, other = self._seconds(self.rows if rows is None else rows)
        return tokens / (target + other)

    def _optimistic_rates(self, home: int) -> np.ndarray:
        """The same, if a shape costs less than ``home`` by one standard deviation of the difference."""
        costs = self.experience.costs
        target, other = self._seconds(self.rows)
        rows = costs.target_weights(self.batch * self.rows, self.cached)
        besides = costs.other_weights(self.of_costs, self.batch)
        target = target * np.exp(-costs.target.std(rows - rows[home]))
        other = other * np.exp(-costs.other.std(besides - besides[home]))
        return self.expected / (target + other)

    def _unseen(self, shape: int) -> list[str]:
        """Source kinds whose acceptance cannot be observed while ``shape`` runs.

        All of them under plain decoding, the draft model under shapes without its levels.
        """
        config = self.configs[shape]
        shown = [] if config is None else ["lookup"] if config.depth == 0 else ["model", "lookup"]
        return [kind for kind in self.kinds if kind not in shown]

    def _choose(self) -> None:
        """Choose the shape of the next steps: the best one, a trial, or one of what was switched off."""
        settings = self.settings
        if self.current == 0 and self.return_to is None:
            self._retry()
            return
        self._predict()
        self.before_retry = None
        rates = self._rates(self.expected)
        home = self.current if self.return_to is None else self.return_to
        if self.return_to is not None:
            self.lost += self.trial_seconds * max(0.0, 1.0 - rates[self.current] / rates[home])
            self.return_to, self.trial_seconds = None, 0.0
        elif self.since > settings.first_wait_steps and not self._unseen(home):
            self.experience.next_wait = settings.first_wait_steps  # speculation pays
        best = self._most_promising(rates, home)
        timed = self.experience.costs.timed.get(PLAIN, 0) >= settings.trial_steps
        if rates[0] > rates[best] and (timed or self.expected[best] < settings.min_tokens_per_step):
            best = 0
        if rates[home] * settings.min_gain >= rates[best]:
            best = home
        self._take(best, home, rates)
        if best == 0:
            self.resumed_at = None
        elif self.resumed_at is not None and self.steps > self.resumed_at + settings.first_wait_steps:
            # It has paid for so long that the text is another by now.
            self.resumed_at, self.experience.wait, self.experience.next_wait = None, 0, settings.first_wait_steps
        if len(self._unseen(best)) > len(self._unseen(home)):
            self.experience.give_up()
        elif best and self._unseen(best) and self.experience.wait == 0:
            self._retry()
        elif best and self.timed and self.steps >= settings.first_trial_steps:
            self._try(rates, best)

    def _most_promising(self, rates: np.ndarray, home: int) -> int:
        """The speculating shape with the most tokens a second.

        Steps of a shape without the draft model show nothing of it. Such a shape must exceed the best of those that
        show as much as ``home`` does by ``unseen_gain_stds`` standard deviations of what is known of its kind.
        """
        best = 1 + int(rates[1:].argmax())
        config, shown = self.configs[best], len(self._unseen(home))
        if config is None or len(self._unseen(best)) <= shown:
            return best
        margin = self.settings.unseen_gain_stds / self.experience.acceptance.evidence(kind_of(config)) ** 0.5
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
        """Give a few steps to the shape of uncertain cost that could be better, if there is one."""
        settings, optimistic = self.settings, self._optimistic_rates(home)
        paused = (shape for shape, step in self.tried.items() if self.steps < step + settings.trial_pause_steps)
        optimistic[[home, *paused]] = 0.0
        shape = int(optimistic.argmax())
        loses = settings.trial_steps * self.elapsed / self.steps * max(0.0, 1.0 - rates[shape] / rates[home])
        cheap = self.lost + loses <= settings.max_trial_time_share * self.elapsed
        if optimistic[shape] > settings.trial_min_gain * rates[home] and cheap:
            self.return_to, self.trial_seconds = home, 0.0
            self.tried[shape] = self.steps
            self._take(shape, home, np.maximum(rates, optimistic))
            self.next_choice = self.steps + settings.trial_steps

    def _retry(self) -> None:
        """Try again what was off for long, speculation or the draft model, where an easy text could make it pay."""
        experience, acceptance = self.experience, self.experience.acceptance
        if experience.wait > 0:
            self.next_choice = self.steps + min(self.settings.max_choice_interval_steps, experience.wait)
            return
        unseen = self._unseen(self.current)
        easy = acceptance.easy_tokens(experience.forecast, unseen)
        rates = self._rates(*(np.concatenate([[1.0], values]) for values in easy))
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
        if self.current == 0:
            self.resumed_at = self.steps
        self._take(best, self.current, rates)
        self.next_choice = self.steps + self.settings.retry_steps
