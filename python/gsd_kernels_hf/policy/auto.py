"""Automatic budgets: the shape of the next step, from what steps cost and what has been accepted.

Tokens per step are predicted by growing small trees from the candidate probabilities that were seen lately, after
calibration: how often a candidate of this rank and this draft probability was the target's pick. Seconds come from
:mod:`gsd_kernels_hf.policy.tuning`, corrected by what steps really took. Shapes come from a small fixed set, so storage
stays static. Where no shape beats one row, speculation is off, and tried again later if it could pay.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gsd_kernels import GraphConfig

from ..records import Verified
from .acceptance import AcceptanceModel, padded
from .tuning import DEPTHS, FAMILIES, FREE, REUSE, ROWS, StepCosts, family_key, tune

GAIN = 1.02  # a new shape must promise this much more than the current one
OPTIMIST = (0.9, 0.05, 0.02, 0.01)  # an easy text: what speculation could reach at best


class Budget:
    """Chooses the shape of every step of one generation."""

    def __init__(self, costs: StepCosts, model: AcceptanceModel) -> None:
        self.costs, self.model = costs, model
        self.steps = 0
        self.wait = 0  # plain steps until speculation is tried again
        self.patience = 64
        self.next_choice = 0
        self.time_ratio: dict[int, float] = {}  # observed over predicted seconds of the target, by rows
        self.rest_ratio: dict[str, float] = {}  # the same of what a speculative step needs besides, by pool
        self.current: GraphConfig | None = None
        self._take(self.choose())

    def begin(self, session: Any) -> None:
        """Attach the calibration of drafted candidates to a session."""
        self.session = session
        session.drafter.calibrate(self.model.branch)

    def shape(self) -> GraphConfig | None:
        """The shape of the next step."""
        if self.current is not None:
            self.model.write(self.session.drafter.calibration)
        return self.current

    def observe(self, verified: Verified, tokens: list[int]) -> None:
        """Learn from a step, and choose anew now and then."""
        if verified.graph is not None:
            found = self.session.drafter.profile(verified)
            profiles = {
                name: tuple(t[seen].cpu().numpy() for t in (probs, hits)) for name, (probs, hits, seen) in found.items()
            }
            self.learn(profiles, tokens)
        target, whole = self.session.clock.last("target"), self.session.clock.since_step()
        self.advance(target, whole - target if target > 0 else 0.0)

    def candidates(self) -> list[tuple[str, int, int]]:
        """(pool, width, branch) of the shapes whose cost is known."""
        families = [("all", *family) for family in FAMILIES] + [("free", *family) for family in FREE]
        return [family for family in families if family_key(*family) in self.costs.draft]

    def choose(self, optimistic: bool = False) -> GraphConfig | None:
        """The shape with the most tokens per second; ``None`` for plain decoding."""
        best_rate, best = 1.0 / self.seconds(None), None
        current_rate = best_rate if self.steps and self.current is None else 0.0
        easy = padded(OPTIMIST, self.model.branch)[None]
        for name, width, branch in self.candidates():
            pool = self.model.pools[name]
            for depth, by_rows in self.model.tokens(width, branch, easy if optimistic else pool.profiles).items():
                for rows in ROWS[1:]:
                    if rows > max(self.costs.target) or rows > len(by_rows) + 8:
                        continue
                    tokens = by_rows[min(rows, len(by_rows)) - 1]
                    tokens = 1.0 + (tokens - 1.0) * (1.0 if optimistic else pool.ratio)
                    config = shape(name, width, branch, depth, rows)
                    rate = tokens / self.seconds(config)
                    if config == self.current:
                        current_rate = rate
                    if rate > best_rate:
                        best_rate, best = rate, config
        keep = self.steps > 0 and not optimistic and current_rate * GAIN >= best_rate
        return self.current if keep else best

    def largest_shapes(self) -> list[GraphConfig]:
        """The largest configuration of every family: what caches and buffers are sized for."""
        return [shape(*family, DEPTHS[-1], max(ROWS)) for family in self.candidates()]

    def _take(self, config: GraphConfig | None) -> None:
        self.current = config
        self.expected = 0.0 if config is None else self.predicted_tokens(config) - 1.0  # beyond the first token

    def seconds(self, config: GraphConfig | None) -> float:
        """Predicted seconds of a step."""
        if config is None:
            return self.costs.target_seconds(1) * self.time_ratio.get(1, 1.0)
        target = self.costs.target_seconds(config.max_rows) * self.time_ratio.get(config.max_rows, 1.0)
        return target + self._rest_seconds(config) * self.rest_ratio.get(family_of(config)[0], 1.0)

    def _rest_seconds(self, config: GraphConfig) -> float:
        return self.costs.draft_seconds(*family_of(config)) + self.costs.overhead

    def predicted_tokens(self, config: GraphConfig) -> float:
        name, width, branch, depth = family_of(config)
        by_rows = self.model.tokens(width, branch, self.model.pools[name].profiles)[depth]
        return float(by_rows[min(config.max_rows, len(by_rows)) - 1])

    def learn(self, profiles: dict[str, tuple[np.ndarray, np.ndarray]], counts: list[int]) -> None:
        """After a speculative step: what :meth:`Session.profile` gives, and the tokens of every sequence."""
        assert self.current is not None
        for name, (probs, hits) in profiles.items():
            self.model.observe(name, probs, hits)
        active = [n for n in counts if n > 0]
        if self.expected > 0.05 and active:
            pool = self.model.pools[family_of(self.current)[0]]
            gained = (sum(active) / len(active) - 1.0) / self.expected
            pool.ratio += 0.05 * (min(gained, 3.0) - pool.ratio)

    def advance(self, target_seconds: float, rest_seconds: float = 0.0) -> None:
        """After every step: what the target forward took and all else (0 if unknown). Chooses anew now and then."""
        self.steps += 1
        rows = 1 if self.current is None else self.current.max_rows
        if target_seconds > 0:
            _follow(self.time_ratio, rows, target_seconds / self.costs.target_seconds(rows))
        if rest_seconds > 0 and self.current is not None:
            # Warpers, heads and host work, which tuning does not measure.
            pool = family_of(self.current)[0]
            _follow(self.rest_ratio, pool, rest_seconds / self._rest_seconds(self.current))
        if self.current is None and self.wait > 0:
            self.wait -= 1
        if self.steps >= self.next_choice:
            self.next_choice = self.steps + min(16, max(4, self.steps // 2))
            self._choose_next()

    def _choose_next(self) -> None:
        if self.current is not None:
            self._take(self.choose())
            if self.current is None:
                self.wait, self.patience = self.patience, 2 * self.patience
        elif self.wait == 0:
            self._take(self.choose(optimistic=True))  # try again where an easier text could pay
            if self.current is None:
                self.wait = self.patience


def _follow(ratios: dict[Any, float], key: Any, observed: float) -> None:
    """Move a ratio towards what was observed. A hiccup of the machine must not scare a shape away for good."""
    old = ratios.get(key, 1.0)
    ratios[key] = old + 0.1 * (min(max(observed, 0.5 * old), 2.0 * old) - old)


def shape(name: str, width: int, branch: int, depth: int, rows: int) -> GraphConfig:
    """One of the fixed set of configurations; cached, since making one validates it."""
    wanted = (name, width, branch, depth, rows)
    if wanted not in _SHAPES:
        levels = {"depth": depth, "width": width, **REUSE}
        if name == "free":
            levels = {"depth": 0, "width": width, "reuse_depth": depth, "reuse_width": width}
        _SHAPES[wanted] = GraphConfig(branch=branch, max_rows=rows, **levels)
    return _SHAPES[wanted]


_SHAPES: dict[tuple[str, int, int, int, int], GraphConfig] = {}


def family_of(config: GraphConfig) -> tuple[str, int, int, int]:
    """Pool, width, branch and depth of one of the fixed set."""
    if config.depth == 0:
        return "free", config.reuse_width, config.branch, config.reuse_depth
    return "all", config.width, config.branch, config.depth


def automatic(model: Any, draft: Any, acceptance: AcceptanceModel, request: Any) -> Budget:
    """The policy of one call."""
    length = request.prompt_length + request.room // 2
    costs = tune(model, draft, batch_size=request.batch, prefix_length=length, backend=request.options.backend)
    return Budget(costs, acceptance)
