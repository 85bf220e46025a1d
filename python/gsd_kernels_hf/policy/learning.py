"""The automatic policy: every step has the shape, or the rows of one shape, with the most predicted tokens a second.

Tokens come from :mod:`acceptance <gsd_kernels_hf.policy.acceptance>`, seconds from :mod:`costs
<gsd_kernels_hf.costs.model>`; both are learned from every step. Where the host may choose a step's rows there is one
wide shape, whose rows a :mod:`selector <gsd_kernels_hf.policy.row_selector>` takes, and its tokens are a running mean.

A choice whose cost is uncertain is tried for a few steps where the tokens to come are expected to pay for them. What
the chosen steps show nothing of (the draft model under shapes without its levels, all sources under plain decoding) is
believed to be easier with every step, until it is tried again. The first step behind a long prompt is plain where a
draft model has to read the prompt too: the first token comes before that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from gsd_kernels import GraphConfig

from ..costs.model import CostModel
from ..records import Verified
from .acceptance import Acceptance
from .row_selector import EdgeModel, RowSelector
from .settings import Automatic

logger = logging.getLogger("gsd_kernels")

MAX_CHOICE_INTERVAL_STEPS = 16  # between choices, at most
KNOWN_CHOICE_STEPS = 4  # until the first choice, where an earlier text's goes on
MIN_TOKENS_PER_STEP = 1.1  # below it speculation is useless whatever it costs
TRIAL_STEPS, TRIAL_PAUSE_STEPS = 2, 9  # length of a trial; steps before the first, and between two
RETURN_STEPS = 3  # of the choice before, until a trial is judged
TRIAL_TOKENS = 1.0  # that a trial must be worth beside its steps: other storage, cold caches
OPTIMISM_STD = 0.75  # uncertain costs are tried as if their log seconds were so many standard deviations lower
EXPLORE_STEPS = 16  # timed steps of a pair, in each of which row counts of uncertain cost are tried
MAX_EXPLORE_INTERVAL_STEPS = 31  # between such trials later
# What a step shows nothing of is believed to be easy by so much more behind each, and where a new text begins.
HOPE, HOPE_OF_TEXT = 1 / 1024, 0.45
MAX_BATCH = 64  # of which the last choice is kept apart


class Plan(NamedTuple):
    """The next step as a policy wants it.

    Attributes:
        shape: of its graph; ``None`` is plain decoding.
        rows: chooses the rows that are forwarded, where the host may decide; ``None``: all.
    """

    shape: GraphConfig | None
    rows: RowSelector | None = None


@dataclass(frozen=True)
class Observation:
    """The outcome of a step.

    Attributes:
        verified: its record, valid until the next step. ``None`` where that is queued already, in replays and tests:
            only the figures below are known.
        tokens: emitted by every sequence; 0 for one that was finished before.
        rows: that the target computed, of each sequence.
        target_seconds, other_seconds: of its forward, and of all else in the step; 0 where unknown.
        late: whether another shape was chosen since it was planned.
    """

    verified: Verified | None
    tokens: Sequence[int]
    rows: int
    target_seconds: float = 0.0
    other_seconds: float = 0.0
    late: bool = False


class FixedPolicy:
    """``config`` in every step; ``None`` is plain decoding."""

    def __init__(self, config: GraphConfig | None) -> None:
        self.config = config

    def plan(self) -> Plan:
        """The next step."""
        return Plan(self.config)

    def observe(self, seen: Observation) -> None:
        """Learn from a step: nothing. Called once after each, before the next plan or before the one behind that."""

    def without_model(self, *, reuses: bool) -> FixedPolicy:
        """End, and what goes on where no source forwards a model any more; within the largest shapes.

        It has the shape's levels without those of a model; where there are no others, as many are looked up, if a
        source ``reuses`` what is there and proposes without a forward.
        """
        config = self.config
        if config is None or not reuses:
            return FixedPolicy(None)
        depth, width = config.history_depth, config.history_width
        if not depth:
            depth, width = config.depth, config.width
        path = min(int(config.max_path or 0), depth)
        return FixedPolicy(config.replace(depth=0, history_depth=depth, history_width=width, max_path=path))

    def end(self) -> None:
        """Keep what was learned, after the last step: nothing."""

    def largest_shapes(self) -> list[GraphConfig]:
        """The shapes that caches and buffers are sized for."""
        return [] if self.config is None else [self.config]


class Experience:
    """The experience of a pair's generations, together: calls that overlap in time share it.

    Args:
        costs: of the pair, for any sampling.
        by_rows: whether rows of the only shape are chosen.

    Attributes:
        acceptance: how many tokens steps bring.
        last: place of the choice that the last text ended with, by batch size; −1: none did.
    """

    def __init__(self, costs: CostModel, *, by_rows: bool = False) -> None:
        self.costs, self.last = costs, np.full(MAX_BATCH, -1)
        self.acceptance = EdgeModel() if by_rows else Acceptance(costs.configs[1:])

    def arrays(self) -> dict[str, np.ndarray]:
        """All that is kept on disk but the costs, in place."""
        return {"last": self.last, **self.acceptance.arrays()}


class LearningPolicy:
    """Plans the steps of one generation: their shapes, and which of their rows are forwarded.

    Args:
        experience: of the pair.
        settings: of one's own.
        batch: sequences.
        prefix: tokens of the prompt.
        reads_prompt: whether a source reads all of the prompt before it proposes.
        backend: of the ops.
        save: called at the end.

    Attributes:
        current: place of the next step's shape in ``configs``, of which 0 is plain decoding.
        home: the choice behind a trial, or behind the opening step; else ``None``.
        log: rows and seconds of the steps since the last choice.
        cached: tokens in the target's cache, all sequences together.
        steps: of the text.
    """

    def __init__(
        self,
        experience: Experience,
        *,
        settings: Automatic | None = None,
        batch: int = 1,
        prefix: int = 0,
        reads_prompt: bool = False,
        backend: str = "auto",
        save: Callable[[], None] | None = None,
    ) -> None:
        self.experience, self.batch, self.save = experience, batch, save
        self.settings, costs, edges = settings or Automatic(), experience.costs, experience.acceptance
        self.names, self.configs = costs.names, costs.configs
        models = any(shape is not None and shape.depth for shape in self.configs)
        # What steps show of the sources: 0 nothing, 1 all but the draft model, 2 all.
        self.shows = np.array([0, *(2 if shape.depth or not models else 1 for shape in self.configs[1:])])
        self.selector = RowSelector(edges, backend) if isinstance(edges, EdgeModel) else None
        self.cached = float(batch * prefix)
        self.steps = 0
        self.next_trial, self.next_exploration = TRIAL_PAUSE_STEPS, 0
        self.home: int | None = None
        self.log: list[tuple[int, float, float]] = []
        experience.acceptance.count_less()
        self._predict()
        last = int(experience.last[min(batch, MAX_BATCH) - 1])
        if last >= 0:
            self.current, self.least = last, max(KNOWN_CHOICE_STEPS, self.settings.first_choice_steps)
            self._hope(HOPE_OF_TEXT)  # a new text may suit what was given up better
        else:  # a shape with all sources is safe, and plain decoding is never chosen by a prior
            self.current = int(np.where(self.shows == 2, self.rates, 0.0).argmax())
            self.least = self.settings.first_choice_steps
        self.next_choice, first = self.least, self.configs[self.current]
        if reads_prompt and prefix >= self.settings.long_prompt_tokens and first is not None and first.depth:
            self.home, self.current = self.current, 0
            self.next_choice = 1
        self._explore()

    def plan(self) -> Plan:
        """The next step: its shape, and where rows are chosen what chooses them."""
        return Plan(self.configs[self.current], self.selector)

    def largest_shapes(self) -> list[GraphConfig]:
        """All of the pair."""
        return list(self.configs[1:])

    def observe(self, seen: Observation) -> None:
        """Learn from a step; now and then choose anew."""
        if self.selector is not None and seen.verified is not None:
            self.selector.observe(seen.verified)
        self.cached += sum(seen.tokens)
        if seen.late:  # of the shape before, which was learned from
            return
        self.steps += 1
        if seen.target_seconds > 0:
            self.log.append((self.batch * seen.rows, seen.target_seconds, seen.other_seconds))
        counts = [count for count in seen.tokens if count > 0]
        if self.current and counts:
            self.experience.acceptance.observe(self.current - 1, counts, seen.rows)
        if self.home is None:
            self._hope(HOPE)
        if self.steps >= self.next_choice:
            self._learn_seconds()
            self.next_choice = self.steps + min(MAX_CHOICE_INTERVAL_STEPS, max(self.least, self.steps // 2))
            self._predict()
            self._choose(timed=seen.target_seconds > 0)
        self._explore()

    def _hope(self, part: float) -> None:
        if self.shows[self.current] < self.shows.max():
            self.experience.acceptance.hope(part, lookups=self.current == 0)

    def _learn_seconds(self) -> None:
        self.experience.costs.observe(self.names[self.current], self.cached, self.log)
        self.log = []

    def _predict(self) -> None:
        """Predict, of every choice: tokens and rows of a sequence, seconds, and how uncertain these are."""
        costs = self.experience.costs
        self.tokens, rows = (np.append(1.0, each) for each in self.experience.acceptance.tokens())
        target = costs.target_seconds(self.batch * rows, self.cached)
        other = costs.other_seconds()
        self.seconds = target + other
        stds = target * costs.target_std(self.batch * rows) + other * costs.other_std()
        self.stds = stds / self.seconds
        self.rates = self.tokens / self.seconds
        if self.selector is not None:
            counts = self.batch * np.arange(1.0, 1.0 + self.configs[1].max_rows)
            forward = costs.target_seconds(counts, self.cached)
            self.by_rows = torch.from_numpy(forward + other[1])
            optimistic = forward * np.exp(-OPTIMISM_STD * costs.target_std(counts))
            self.optimistic = torch.from_numpy(optimistic + other[1])

    def _explore(self) -> None:
        """Tell the selector the seconds of a step by row count; now and then, for one step, optimistic ones."""
        if self.selector is None or not self.current:
            return
        explores = self.steps >= self.next_exploration
        self.selector.seconds = self.optimistic if explores else self.by_rows
        if explores and (timed := self.experience.costs.steps) >= EXPLORE_STEPS:
            self.next_exploration = self.steps + min(MAX_EXPLORE_INTERVAL_STEPS, max(TRIAL_PAUSE_STEPS, timed // 4))

    def _choose(self, *, timed: bool) -> None:
        """Choose the shape of the next steps: the best one, a trial, or one of what was given up."""
        if self.home is not None:
            # Home again before anything is taken: the machine may have become another during the trial.
            self.current, self.home, self.next_choice = self.home, None, self.steps + RETURN_STEPS
            return
        home, best = self.current, self._best(self.current)
        if self.shows[best] > self.shows[home]:  # given up once: a few steps say whether that was right
            self.experience.acceptance.count_less()
            self.next_choice = self.steps + self.settings.retry_steps
        self.current = best
        if best != home:
            logger.log(
                logging.INFO if 0 in (best, home) else logging.DEBUG,
                "auto: %s after %d steps: %s has %.1f tokens/s by %.2f tokens a step, %s %.1f by %.2f",
                "speculation off" if best == 0 else "speculation on" if home == 0 else "switch",
                self.steps,
                *(each[place] for place in (best, home) for each in (self.names, self.rates, self.tokens)),
            )
        if timed and best and self.steps >= self.next_trial:
            self._try(best)

    def _best(self, home: int) -> int:
        """The choice with the most tokens a second, if that is enough more than ``home`` has."""
        more = np.full_like(self.rates, self.settings.min_gain)
        if self.tokens[1:].max() > MIN_TOKENS_PER_STEP and not self.experience.costs.timed[0]:
            more[0] = np.inf  # plain decoding is not chosen by a guess of what it takes
        more[home] = 1.0
        return int((self.rates / more).argmax())

    def _try(self, home: int) -> None:
        """Give a few steps to the choice of uncertain cost from which the tokens to come gain most, if any do."""
        gains = np.log(self.rates / (self.settings.min_gain * self.rates[home])) + OPTIMISM_STD * self.stds
        lost = TRIAL_TOKENS + TRIAL_STEPS * self.tokens * np.maximum(self.rates[home] / self.rates - 1.0, 0.0)
        worth = np.where(self.stds > 0.02, self.settings.payback_tokens * gains - lost, 0.0)
        worth[home] = 0.0
        if worth.max() > 0.0:
            self.home, self.current = home, int(worth.argmax())
            self.next_choice = self.steps + TRIAL_STEPS
            self.next_trial = self.next_choice + TRIAL_PAUSE_STEPS

    def without_model(self, *, reuses: bool) -> FixedPolicy | LearningPolicy:
        """End, and go on with the best of the shapes without a model's levels, or plain decoding."""
        if not any(shape is not None and shape.depth for shape in self.configs):
            return self
        self.end()
        some = [shape is None or (reuses and not shape.depth) for shape in self.configs]
        return FixedPolicy(self.configs[int(np.where(some, self.rates, 0.0).argmax())])

    def end(self) -> None:
        """Keep what was learned, and where the generation ended."""
        self._learn_seconds()
        settled = self.current if self.home is None else self.home
        self.experience.last[min(self.batch, MAX_BATCH) - 1] = settled
        if self.save is not None:
            self.save()


Policy = FixedPolicy | LearningPolicy
"""Plans every step of one generation."""
