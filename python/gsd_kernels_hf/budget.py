"""Automatic budgets: the shape of the next step, from what steps cost and what has been accepted.

Tokens per step are predicted by growing small trees from the candidate probabilities that were seen lately, after
calibration: how often a candidate of this rank and this draft probability was the target's pick. Seconds come from
:mod:`gsd_kernels_hf.tuning`, corrected by what steps really took. Shapes come from a small fixed set, so storage stays
static. Where no shape beats one row, speculation is off, and tried again later if it could pay.
"""

from __future__ import annotations

import numpy as np
import torch

from gsd_kernels import GraphConfig

from .drafting import Calibration, Drafter
from .history import WORTH
from .tuning import DEPTHS, FAMILIES, REUSE, ROWS, StepCosts

POOL = 64  # profiles kept
FORGET = 0.998  # of what was counted, a step
TREES = 12  # trees grown for a prediction
GAIN = 1.02  # a new shape must promise this much more than the current one
PRIOR = (0.62, 0.12, 0.06, 0.04)  # acceptance by rank, before anything was seen
OPTIMIST = (0.9, 0.05, 0.02, 0.01)  # an easy text: what speculation could reach at best


class AcceptanceModel:
    """How often a drafted candidate is what the target picks, by rank and draft probability; forgets slowly."""

    def __init__(self, branch: int) -> None:
        self.branch = branch
        bins = len(Calibration.EDGES) + 1
        # Hits, and hits expected by the draft. Start out by believing the draft, with the weight of a few hits.
        self.hits = np.full((branch, bins), 3.0)
        self.expected = np.full((branch, bins), 3.0)
        self.history_hits = 3.0 * np.array(WORTH)
        self.history_expected = np.full(len(WORTH), 3.0)  # by matched context
        self.pool = np.tile(_padded(PRIOR, branch), (POOL, 1))  # [POOL, K]; calibrated profiles, newest overwrite
        self.seen = 0
        self.ratio = 1.0  # observed over predicted tokens beyond the first

    def observe(self, probs: np.ndarray, hits: np.ndarray, matched: np.ndarray) -> None:
        """Candidates after accepted nodes as proposed, and whether each was picked, [n, K]; matched context, [n]."""
        drafted = matched == 0
        self.history_hits = _forget(self.history_hits, 3.0 * np.array(WORTH))
        self.history_expected = _forget(self.history_expected, 3.0)
        known = matched > 0
        np.add.at(self.history_hits, matched[known], hits[known].sum(1))
        np.add.at(self.history_expected, matched[known], probs[known].sum(1))
        probs, hits = probs[drafted], hits[drafted]
        if not len(probs):
            return
        ranks, bins = self._cells(probs)
        self.hits, self.expected = _forget(self.hits, 3.0), _forget(self.expected, 3.0)
        np.add.at(self.hits, (ranks, bins), hits.astype(float))
        np.add.at(self.expected, (ranks, bins), probs)
        for profile in np.minimum(probs * (self.hits / self.expected)[ranks, bins], 1.0):
            self.pool[self.seen % POOL, : len(profile)] = profile
            self.pool[self.seen % POOL, len(profile) :] *= 0.5  # a wider shape would have had something there
            self.seen += 1

    def write(self, drafter: Drafter) -> None:
        """Put the current ratios into the device tables."""
        if drafter.calibration is not None:
            table = torch.from_numpy(np.log(self.hits / self.expected)).float()
            drafter.calibration.log_ratio.copy_(table[: drafter.calibration.log_ratio.shape[0]], non_blocking=True)
        if drafter.history is not None:
            ratio = np.log(np.maximum(self.history_hits, 1e-9) / self.history_expected)
            drafter.history.log_worth[1:].copy_(torch.from_numpy(ratio[1:]).float(), non_blocking=True)

    def _cells(self, probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ranks = np.broadcast_to(np.arange(probs.shape[1]), probs.shape)
        return ranks, np.searchsorted(Calibration.EDGES, probs)

    def tokens(self, width: int, branch: int, pool: np.ndarray | None = None) -> dict[int, np.ndarray]:
        """Predicted tokens per step by depth: an array by rows, entry r − 1 for r rows."""
        pool = self.pool if pool is None else pool
        rng = np.random.default_rng(0)  # the same trees every time: differences between shapes are not noise

        def profiles(*shape: int) -> np.ndarray:
            return pool[rng.integers(len(pool), size=shape), :branch]

        nodes = profiles(TREES)  # [TREES, n]; path probabilities
        open_nodes = nodes
        by_depth = {}
        for depth in range(1, DEPTHS[-1] + 1):
            if depth > 1:
                order = np.argsort(-open_nodes, axis=1)
                ranked = np.take_along_axis(open_nodes, order, 1)
                frontier, rest = ranked[:, :width], ranked[:, width:]
                children = (frontier[:, :, None] * profiles(TREES, frontier.shape[1])).reshape(TREES, -1)
                nodes = np.concatenate([nodes, children], 1)
                open_nodes = np.concatenate([rest, children], 1)
            if depth in DEPTHS:
                best = -np.sort(-nodes, axis=1)
                by_depth[depth] = 1.0 + np.concatenate([[0.0], best.mean(0).cumsum()])
        return by_depth


class Budget:
    """Chooses the shape of every step of one generation."""

    def __init__(self, costs: StepCosts, model: AcceptanceModel) -> None:
        self.costs, self.model = costs, model
        self.steps = 0
        self.wait = 0  # plain steps until speculation is tried again
        self.patience = 64
        self.next_choice = 0
        self.time_ratio: dict[int, float] = {}  # observed over predicted seconds, by rows
        self.current: GraphConfig | None = None
        self._take(self.choose())

    def choose(self, optimistic: bool = False) -> GraphConfig | None:
        """The shape with the most tokens per second; ``None`` for plain decoding."""
        pool = _padded(OPTIMIST, self.model.branch)[None] if optimistic else None
        best_rate, best = 1.0 / self.seconds(None), None
        current_rate = best_rate if self.steps and self.current is None else 0.0
        for width, branch in FAMILIES:
            for depth, by_rows in self.model.tokens(width, branch, pool).items():
                for rows in ROWS[1:]:
                    if rows > max(self.costs.target) or rows > len(by_rows) + 8:
                        continue
                    tokens = by_rows[min(rows, len(by_rows)) - 1]
                    tokens = 1.0 + (tokens - 1.0) * (1.0 if optimistic else self.model.ratio)
                    config = shape(width, branch, depth, rows)
                    rate = tokens / self.seconds(config)
                    if config == self.current:
                        current_rate = rate
                    if rate > best_rate:
                        best_rate, best = rate, config
        keep = self.steps > 0 and not optimistic and current_rate * GAIN >= best_rate
        return self.current if keep else best

    def _take(self, config: GraphConfig | None) -> None:
        self.current = config
        self.expected = 0.0 if config is None else self.predicted_tokens(config) - 1.0  # beyond the first token

    def seconds(self, config: GraphConfig | None) -> float:
        """Predicted seconds of a step."""
        if config is None:
            return self.costs.target_seconds(1) * self.time_ratio.get(1, 1.0)
        target = self.costs.target_seconds(config.max_rows) * self.time_ratio.get(config.max_rows, 1.0)
        return target + self.costs.draft_seconds(config.width, config.branch, config.depth) + self.costs.overhead

    def predicted_tokens(self, config: GraphConfig) -> float:
        by_rows = self.model.tokens(config.width, config.branch)[config.depth]
        return float(by_rows[min(config.max_rows, len(by_rows)) - 1])

    def learn(self, probs: np.ndarray, hits: np.ndarray, matched: np.ndarray, counts: list[int]) -> None:
        """After a speculative step: what :meth:`Session.profile` gives, and the tokens of every sequence."""
        assert self.current is not None
        self.model.observe(probs, hits, matched)
        active = [n for n in counts if n > 0]
        if self.expected > 0.05 and active:
            gained = (sum(active) / len(active) - 1.0) / self.expected
            self.model.ratio += 0.05 * (min(gained, 3.0) - self.model.ratio)

    def advance(self, target_seconds: float) -> None:
        """After every step: what the target forward took (0 if unknown). Chooses anew now and then."""
        self.steps += 1
        rows = 1 if self.current is None else self.current.max_rows
        if target_seconds > 0:
            ratio = target_seconds / self.costs.target_seconds(rows)
            old = self.time_ratio.get(rows, 1.0)
            # A hiccup of the machine must not scare a shape away for good.
            self.time_ratio[rows] = old + 0.1 * (min(max(ratio, 0.5), 2.0) - old)
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


def _forget(counts: np.ndarray, prior: np.ndarray | float) -> np.ndarray:
    return prior + (counts - prior) * FORGET


def shape(width: int, branch: int, depth: int, rows: int) -> GraphConfig:
    """One of the fixed set of configurations; cached, since making one validates it."""
    key = (width, branch, depth, rows)
    if key not in _SHAPES:
        _SHAPES[key] = GraphConfig(depth=depth, width=width, branch=branch, max_rows=rows, **REUSE)
    return _SHAPES[key]


_SHAPES: dict[tuple[int, int, int, int], GraphConfig] = {}


def _padded(profile: tuple[float, ...], branch: int) -> np.ndarray:
    out = np.zeros(branch)
    out[: len(profile)] = profile[:branch]
    return out


def largest_shapes() -> list[GraphConfig]:
    """The largest configuration of every family: what caches and buffers are sized for."""
    return [shape(width, branch, DEPTHS[-1], max(ROWS)) for width, branch in FAMILIES]
