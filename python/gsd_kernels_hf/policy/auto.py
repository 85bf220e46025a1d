"""Automatic shapes: what a step brings over what it costs, with every step as evidence.

Shapes come from a :mod:`ladder <gsd_kernels_hf.policy.ladder>`, tokens from :mod:`acceptance
<gsd_kernels_hf.policy.acceptance>`, seconds from :mod:`costs <gsd_kernels_hf.policy.costs>`. A generation begins with
the shape that the last one ended with, or with the most promising one that speculates. A shape whose cost is uncertain
and that would be best if it were cheap is tried for two steps, as long as trials have cost little. So is plain
decoding, which is never chosen before it was timed, unless steps bring one token anyhow. Where it is best, speculation
is off, and tried again later; likewise the draft model where shapes without it are best.

The first step behind a long prompt is plain where a draft model has to read the prompt too: the first token comes
before that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gsd_kernels import GraphConfig

from .acceptance import AcceptanceModel, GrowthPlan, kind_of
from .base import Profiles
from .budget import RowBudget
from .costs import COLD, NOISE, PLAIN, CostModel
from .fixed import FixedPolicy
from .ladder import BRANCH
from .patience import NOTHING, PATIENCE, RETRY_STEPS, Patience, kept

GAIN = 1.02  # a new shape must promise this much more than the current one
DOUBT = 1.0  # of a shape that shows less, in standard deviations of what steps of its kind bring
HOPE = 1.05  # an uncertain one this much more, at best, to be tried
TRIAL_STEPS = 2
FIRST_TRIAL = 8  # steps of a generation before
REST = 16  # steps until a shape is tried again
TRIAL_SHARE = 0.02  # of the time of a generation, which trials may cost
FIRST_CHOICE, KNOWN_CHOICE = 2, 10  # steps until the first choice; where an earlier call's shape goes on
SURPRISE = 5.0  # tokens expected beyond one a step, of which a quarter came at most, until a text is another
INTERVAL = 16  # steps between choices, at most
REMEMBERED = 8  # batch sizes
LONG_PROMPT = 512  # tokens, which even a small draft reads for longer than a plain step takes


class _Step(NamedTuple):
    """What a policy is told of a step; tokens of the sequences that were not finished, and those cached before it."""

    profiles: Profiles
    tokens: list[int]
    rows: int
    cached: float
    target_seconds: float
    other_seconds: float


class Experience(Patience):
    """What generations of a pair learn, together: calls that overlap in time share it.

    Args:
        costs: of the pair, for any sources and sampling.
        shapes: of the ladder, by name; a subset of those that ``costs`` knows.
    """

    def __init__(self, costs: CostModel, shapes: Mapping[str, GraphConfig]) -> None:
        super().__init__()
        self.costs = costs
        self.shapes = dict(shapes)
        self.acceptance = AcceptanceModel(BRANCH)
        self.plan = GrowthPlan(list(self.shapes.values()), BRANCH)
        self.predicted: tuple[np.ndarray, np.ndarray] | None = None  # what a choice went by last: tokens and rows
        self.last: dict[str, str] = {}  # batch size → shape that the last generation ended with
        self.warm: set[str] = set()  # shapes that ran in this process

    def as_dict(self) -> dict[str, Any]:
        """All but the costs, for the disk."""
        return {"acceptance": self.acceptance.as_dict(), "last": self.last, **super().as_dict()}

    def load(self, data: Mapping[str, Any]) -> None:
        """What :meth:`as_dict` gave.

        Raises:
            ValueError, KeyError, TypeError: it is not that; nothing was taken over.
        """
        last = {str(batch): str(name) for batch, name in data["last"].items()}
        wait, patience = kept(data)
        self.acceptance.load(data["acceptance"])
        self.last, self.wait, self.patience = last, wait, patience
        self.predicted = None

    def keep(self, batch: int, name: str) -> None:
        """Remember where a generation ended."""
        last = {b: n for b, n in self.last.items() if b != str(batch)}
        self.last = dict([*last.items(), (str(batch), name)][-REMEMBERED:])


class AutoPolicy:
    """The shape with the most predicted tokens a second; see :class:`~gsd_kernels_hf.policy.base.Policy`.

    Args:
        experience: of the pair.
        batch: sequences.
        prefix: tokens of the prompt.
        reads_prompt: whether a source reads all of the prompt before it proposes.
        saver: has ``save()``, called at the end.
    """

    def __init__(
        self,
        experience: Experience,
        *,
        batch: int = 1,
        prefix: int = 0,
        reads_prompt: bool = False,
        saver: Any = None,
    ) -> None:
        self.experience, self.batch, self.saver = experience, batch, saver
        self.acceptance: AcceptanceModel | None = experience.acceptance
        # A draft model proposes little that is not worth a row: choosing rows beside it cost 4% in races.
        self.budget: RowBudget | None = None
        self.names = (PLAIN, *experience.shapes)
        self.configs: tuple[GraphConfig | None, ...] = (None, *experience.shapes.values())
        self.of_costs = np.array([experience.costs.index[name] for name in self.names])
        self.kinds = tuple(dict.fromkeys(kind_of(shape) for shape in experience.shapes.values()))
        self.cached = float(batch * prefix)  # tokens in the target's cache, all sequences together
        self.steps = 0
        self.since = 0  # steps of the current shape
        self.tried: dict[int, int] = {}  # shape → step of its last trial
        self.noted: list[_Step] = []  # since the last choice
        self.home: int | None = None  # during a trial: the shape to go back to
        self.left: int | None = None  # until the first choice of a retry: the shape before
        self.resumed: int | None = None  # step at which speculation was tried again, until it is off or has paid
        self.timed = False  # whether the last step's times were known
        self.elapsed = self.lost = self.trial_seconds = 0.0
        self.expected = self.rows = np.ones(len(self.names))
        self.current, self.next_choice = self._first()
        first = self.configs[self.current]
        self.opens = reads_prompt and prefix >= LONG_PROMPT and first is not None and first.depth > 0
        if self.opens:
            self.home, self.current = self.current, 0

    def _first(self) -> tuple[int, int]:
        """The first step's shape, and when to choose."""
        last = self.experience.last.get(str(self.batch))
        if last in self.names and self.experience.predicted is not None:
            self.expected, self.rows = self.experience.predicted  # nothing is chosen by them
        else:
            self._predict()
        if last in self.names:
            if self._unseen(self.names.index(last)):  # which a new text may suit better
                self.experience.wait = min(self.experience.wait, KNOWN_CHOICE)
            return self.names.index(last), KNOWN_CHOICE
        # Costs are guessed: a shape with all sources is safe, and plain decoding is not chosen by a guess.
        drafted = [i for i, shape in enumerate(self.configs) if shape is not None and shape.depth]
        some = np.array(drafted or range(1, len(self.names)))
        return int(some[self._rates(self.expected)[some].argmax()]), FIRST_CHOICE

    def shape(self) -> GraphConfig | None:
        """The shape of the next step."""
        return self.configs[self.current]

    def largest_shapes(self) -> list[GraphConfig]:
        """All of the ladder."""
        return list(self.experience.shapes.values())

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
        going = [count for count in tokens if count > 0]
        self.noted.append(_Step(profiles, going, rows, self.cached, target_seconds, other_seconds))
        self.timed = target_seconds > 0
        self.elapsed += target_seconds + other_seconds
        self.trial_seconds += target_seconds + other_seconds if self.home is not None else 0.0
        self.cached += sum(tokens)
        self.steps += 1
        self.since += 1
        if self.opens:
            self._end_opening()
            return
        if self.home is None and self._unseen(self.current):
            self.experience.wait = max(0, self.experience.wait - 1)
        another = self._another_text()
        if another:
            self.experience.acceptance.forget()
        if another or self.steps >= self.next_choice:
            self.next_choice = self.steps + min(INTERVAL, max(FIRST_CHOICE, self.steps // 2))
            self._learn()
            self._choose()

    def _end_opening(self) -> None:
        """Go on, after the first step, as if the generation began here."""
        assert self.home is not None
        self._learn()
        self.current, self.home, self.opens = self.home, None, False
        self.steps, self.since, self.elapsed, self.trial_seconds = 0, 0, 0.0, 0.0

    def _another_text(self) -> bool:
        """Whether the first steps, of the shape that an earlier text ended with, bring far less than that text did."""
        if len(self.kinds) == 1 or self.steps != len(self.noted) or self.steps >= self.next_choice:
            return False  # with one kind of shapes there is no other to go to
        expected = self.steps * (self.expected[self.current] - 1.0)
        gained = sum(sum(step.tokens) / max(len(step.tokens), 1) - 1.0 for step in self.noted)
        return expected >= SURPRISE and gained <= 0.25 * expected

    def _learn(self) -> None:
        """Take in the steps since the last choice, all of one shape; after a single one all would be out of cache."""
        experience, name, config = self.experience, self.names[self.current], self.configs[self.current]
        pools: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        for step in self.noted:
            for pool, found in step.profiles.items():
                pools.setdefault(pool, []).append(found)
            if config is not None and step.tokens:
                gained = sum(step.tokens) / len(step.tokens) - 1.0
                experience.acceptance.observe_gain(kind_of(config), gained, self.expected[self.current])
            noise = NOISE if name in experience.warm else COLD
            experience.warm.add(name)
            rows = self.batch * step.rows
            seconds = step.target_seconds, step.other_seconds
            experience.costs.observe(name, rows, step.cached, self.batch, *seconds, noise=noise)
        for pool, found in pools.items():
            probs, hits = (np.concatenate(parts) for parts in zip(*found, strict=True))
            experience.acceptance.observe(pool, probs, hits, steps=len(found))
        self.noted.clear()

    def end(self) -> None:
        """Keep what was learned."""
        self._learn()
        settled = next(shape for shape in (self.left, self.home, self.current) if shape is not None)
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
        predicted = self.experience.acceptance.tokens(self.experience.plan)
        self.expected, self.rows = (np.concatenate([[1.0], values]) for values in predicted)
        self.experience.predicted = self.expected, self.rows

    def _seconds(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        costs = self.experience.costs
        return costs.target_seconds(self.batch * rows, self.cached), costs.other_seconds(self.batch)[self.of_costs]

    def _rates(self, tokens: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """Tokens a second of a sequence, by shape; with the rows that were predicted last, or others."""
        target, other = self._seconds(self.rows if rows is None else rows)
        return tokens / (target + other)

    def _hopes(self, home: int) -> np.ndarray:
        """The same, if a shape costs less than ``home`` by as much as is not known."""
        costs = self.experience.costs
        target, other = self._seconds(self.rows)
        rows = costs.target_weights(self.batch * self.rows, self.cached)
        besides = costs.other_weights(self.of_costs, self.batch)
        target = target * np.exp(-costs.target.spread(rows - rows[home]))
        other = other * np.exp(-costs.other.spread(besides - besides[home]))
        return self.expected / (target + other)

    def _unseen(self, shape: int) -> list[str]:
        """Kinds of shapes of which steps of ``shape`` show nothing: all in plain ones, the model in those without."""
        config = self.configs[shape]
        shown = [] if config is None else ["lookup"] if config.depth == 0 else ["model", "lookup"]
        return [kind for kind in self.kinds if kind not in shown]

    def _choose(self) -> None:
        if self.current == 0 and self.home is None:
            self._retry()
            return
        self._predict()
        self.left = None
        rates = self._rates(self.expected)
        home = self.current if self.home is None else self.home
        if self.home is not None:
            self.lost += self.trial_seconds * max(0.0, 1.0 - rates[self.current] / rates[home])
            self.home, self.trial_seconds = None, 0.0
        elif self.since > PATIENCE and not self._unseen(home):
            self.experience.patience = PATIENCE  # speculation pays
        best = self._most_promising(rates, home)
        timed = self.experience.costs.tried.get(PLAIN, 0) >= TRIAL_STEPS
        if rates[0] > rates[best] and (timed or self.expected[best] < NOTHING):
            best = 0
        if rates[home] * GAIN >= rates[best]:
            best = home
        self._take(best)
        if best == 0:
            self.resumed = None
        elif self.resumed is not None and self.steps > self.resumed + PATIENCE:  # the text has become another
            self.resumed, self.experience.wait, self.experience.patience = None, 0, PATIENCE
        if len(self._unseen(best)) > len(self._unseen(home)):
            self.experience.give_up()
        elif best and self._unseen(best) and self.experience.wait == 0:
            self._retry()
        elif best and self.timed and self.steps >= FIRST_TRIAL:
            self._try(rates, best)

    def _most_promising(self, rates: np.ndarray, home: int) -> int:
        """The speculating shape with the most tokens a second; what was not tried yet may not hide what was by little.

        Steps of a shape without the draft model say nothing of it. What such a shape promises over the best of those
        that show as much as ``home`` does has to exceed what is not known of its kind.
        """
        best = 1 + int(rates[1:].argmax())
        config, shown = self.configs[best], len(self._unseen(home))
        if config is None or len(self._unseen(best)) <= shown:
            return best
        doubt = DOUBT / self.experience.acceptance.evidence(kind_of(config)) ** 0.5
        some = [i for i in range(1, len(self.names)) if len(self._unseen(i)) <= shown]
        other = max(some, key=rates.__getitem__)
        return best if rates[best] > (1.0 + doubt) * rates[other] else other

    def _take(self, shape: int) -> None:
        if shape != self.current:
            self.since = 0
        self.current = shape

    def _try(self, rates: np.ndarray, home: int) -> None:
        """Give two steps to the shape that could be better, if there is one."""
        hopes = self._hopes(home)
        hopes[[home, *(shape for shape, step in self.tried.items() if self.steps < step + REST)]] = 0.0
        shape = int(hopes.argmax())
        loses = TRIAL_STEPS * self.elapsed / self.steps * max(0.0, 1.0 - rates[shape] / rates[home])
        if hopes[shape] > HOPE * rates[home] and self.lost + loses <= TRIAL_SHARE * self.elapsed:
            self.home, self.trial_seconds = home, 0.0
            self.tried[shape] = self.steps
            self._take(shape)
            self.next_choice = self.steps + TRIAL_STEPS

    def _retry(self) -> None:
        """Something was off for long, speculation or the draft model: try it again where an easier text could pay."""
        experience, acceptance = self.experience, self.experience.acceptance
        if experience.wait > 0:
            self.next_choice = self.steps + min(INTERVAL, experience.wait)
            return
        unseen = self._unseen(self.current)
        easy = acceptance.easy_tokens(experience.plan, unseen)
        rates = self._rates(*(np.concatenate([[1.0], values]) for values in easy))
        some = [i for i, config in enumerate(self.configs) if config is not None and kind_of(config) in unseen]
        some = [i for i in some if rates[i] >= GAIN * rates[self.current]]
        if not some:
            experience.wait = experience.patience
            return
        best = min(some, key=lambda i: (len(self._unseen(i)), -float(rates[i])))  # what shows most
        for kind in unseen:
            if kind not in self._unseen(best):
                acceptance.restart(kind)
        self._predict()
        self.left = self.current
        if self.current == 0:
            self.resumed = self.steps
        self._take(best)
        self.next_choice = self.steps + RETRY_STEPS
