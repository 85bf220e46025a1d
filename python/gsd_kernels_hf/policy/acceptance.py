"""What has been accepted lately, and how many tokens a step of any shape would bring.

Tokens per step are predicted by growing small trees from the candidate probabilities that were seen lately, after
calibration: how often a candidate of this rank and this draft probability was the target's pick. What steps really
brought corrects the prediction, shape by shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gsd_kernels import GraphConfig

from ..sources.weights import Calibration

POOL = 64  # profiles kept
START = 4  # profiles that a prior counts for
SEEN = 32  # profiles from which on predictions are judged
FORGET = 0.998  # of what was counted, an observation
TREES = 12  # trees grown for a prediction
OPEN = 64  # unexpanded nodes that a tree keeps
# Acceptance by rank, before anything was seen: of a model with all other sources, and of those that cost no forward.
PRIORS = {"model": (0.62, 0.12, 0.06, 0.04), "lookup": (0.4, 0.08, 0.04, 0.02)}
OPTIMIST = (0.95, 0.03, 0.01, 0.005)  # an easy text: what speculation could reach at best
BELIEF = 6.0  # hits that the draft's own probabilities count for
KIND_WEIGHT, SHAPE_WEIGHT = 16.0, 200.0  # tokens that a ratio of one counts for, of a kind of shape and of one shape
GAIN_MEMORY = 0.99  # of what a shape brought, a step


def kind_of(config: GraphConfig) -> str:
    """``"model"`` for a shape with levels that a draft model expands, ``"lookup"`` for one without."""
    return "model" if config.depth else "lookup"


class Pool:
    """Candidate probabilities that were seen lately, calibrated: [n, K], oldest first, at most :data:`POOL`."""

    def __init__(self, prior: tuple[float, ...], branch: int) -> None:
        self.profiles = np.tile(padded(prior, branch), (START, 1))

    def add(self, probs: np.ndarray) -> None:
        """[n, K']"""
        new = np.zeros((len(probs), self.profiles.shape[1]))
        new[:, : probs.shape[1]] = probs
        for rank in range(probs.shape[1], new.shape[1]):  # a wider shape would have had something there
            new[:, rank] = 0.5 * np.minimum(new[:, rank - 1], np.maximum(1.0 - new[:, :rank].sum(1), 0.0))
        self.profiles = np.concatenate([self.profiles, new])[-POOL:]

    def restart(self) -> None:
        """Forget: what comes is another text, perhaps an easy one."""
        self.profiles = np.tile(padded(OPTIMIST, self.profiles.shape[1]), (START // 2, 1))


class AcceptanceModel:
    """How often a drafted candidate is what the target picks, by rank and draft probability; forgets slowly."""

    def __init__(self, branch: int) -> None:
        self.branch = branch
        bins = len(Calibration.EDGES) + 1
        # Hits, and hits expected by the draft. Start out by believing the draft, with the weight of a few hits.
        self.hits = np.full((branch, bins), BELIEF)
        self.expected = np.full((branch, bins), BELIEF)
        self.pools = {name: Pool(prior, branch) for name, prior in PRIORS.items()}
        # Tokens beyond the first that steps brought, and that had been predicted: by kind or shape.
        self.gains: dict[str, tuple[float, float]] = {}

    def observe(self, name: str, probs: np.ndarray, hits: np.ndarray) -> None:
        """Candidates after accepted nodes as proposed by ``name``'s sources, and whether each was picked, [n, K]."""
        if not len(probs):
            return
        probs, hits = probs[:, : self.branch].astype(float), hits[:, : self.branch]
        if name == "model":
            ranks, bins = self._cells(probs)
            self.hits, self.expected = (BELIEF + (counts - BELIEF) * FORGET for counts in (self.hits, self.expected))
            np.add.at(self.hits, (ranks, bins), hits.astype(float))
            np.add.at(self.expected, (ranks, bins), probs)
            probs = np.minimum(probs * (self.hits / self.expected)[ranks, bins], 1.0)
        self.pools[name].add(probs)

    def observe_gain(self, config: GraphConfig, key: str, gained: float, predicted: float) -> None:
        """Tokens beyond the first that a step of ``config`` brought a sequence, and what :meth:`tokens` had said."""
        kind = kind_of(config)
        if len(self.pools[kind].profiles) < SEEN:  # a prediction from the prior says nothing of the shape
            return
        predicted = 1.0 + (predicted - 1.0) / max(self.ratio(config, key), 1e-3)  # before correction
        for name in (kind, key):
            observed, expected = self.gains.get(name, (0.0, 0.0))
            self.gains[name] = (GAIN_MEMORY * observed + gained, GAIN_MEMORY * expected + predicted - 1.0)

    def ratio(self, config: GraphConfig, key: str) -> float:
        """Observed over predicted tokens beyond the first; of the shape, as far as it was seen, else of its kind."""
        observed, expected = self.gains.get(kind_of(config), (0.0, 0.0))
        kind = (KIND_WEIGHT + observed) / (KIND_WEIGHT + expected)
        observed, expected = self.gains.get(key, (0.0, 0.0))
        return (SHAPE_WEIGHT * kind + observed) / (SHAPE_WEIGHT + expected)

    def restart(self, kind: str) -> None:
        """Forget what was accepted lately of one kind of shape."""
        self.pools[kind].restart()
        self.gains = {
            name: pair for name, pair in self.gains.items() if name.startswith("lookup") != (kind == "lookup")
        }

    def write(self, calibration: Calibration | None) -> None:
        """Put the current ratios into the device table."""
        if calibration is not None:
            table = torch.from_numpy(np.log(self.hits / self.expected)).float()
            calibration.log_ratio.copy_(table[: calibration.log_ratio.shape[0]], non_blocking=True)

    def _cells(self, probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ranks = np.broadcast_to(np.arange(probs.shape[1]), probs.shape)
        return ranks, np.searchsorted(Calibration.EDGES, probs)

    def tokens(self, plan: GrowthPlan, keys: Sequence[str]) -> np.ndarray:
        """Predicted tokens per step of every shape of ``plan``, float64 [S]."""
        grown = plan.tokens({name: pool.profiles for name, pool in self.pools.items()})
        ratios = [self.ratio(config, key) for config, key in zip(plan.shapes, keys, strict=True)]
        return 1.0 + (grown - 1.0) * np.array(ratios)

    def easy_tokens(self, plan: GrowthPlan, kinds: Sequence[str]) -> np.ndarray:
        """The same on a text that is easy for the sources of these kinds, whatever was seen of them."""
        easy = padded(OPTIMIST, self.branch)[None]
        return plan.tokens({name: easy if name in kinds else pool.profiles for name, pool in self.pools.items()})

    def as_dict(self) -> dict[str, Any]:
        """All of it, for the disk."""
        return {
            "hits": self.hits.tolist(),
            "expected": self.expected.tolist(),
            "pools": {name: pool.profiles.tolist() for name, pool in self.pools.items()},
            "gains": {name: list(pair) for name, pair in self.gains.items()},
        }

    def load(self, data: Mapping[str, Any]) -> None:
        """What :meth:`as_dict` gave.

        Raises:
            ValueError, KeyError, TypeError: it is not that; nothing was taken over.
        """
        tables = [np.array(data[name], dtype=float) for name in ("hits", "expected")]
        pools = {name: np.array(data["pools"][name], dtype=float) for name in self.pools}
        gains = {str(name): (float(a), float(b)) for name, (a, b) in data["gains"].items()}
        if any(table.shape != self.hits.shape or not (table > 0).all() for table in tables):
            raise ValueError("acceptance: tables of another size")
        for rows in pools.values():
            fits = rows.ndim == 2 and rows.shape[1] == self.branch and 0 < len(rows) <= POOL
            if not fits or not ((rows >= 0) & (rows <= 1)).all():
                raise ValueError("acceptance: profiles of another size, or no probabilities")
        self.hits, self.expected = tables
        for name, rows in pools.items():
            self.pools[name].profiles = rows
        self.gains = gains


class GrowthPlan:
    """Trees of several shapes, grown side by side from the same profiles.

    A shape's first ``depth`` levels draw from the pool ``"model"``, its history levels from ``"lookup"``. Which
    profile a node gets is fixed once, so that differences between shapes are not noise. Merging is not modelled.

    Args:
        shapes: S of them.
        branch: candidates in a profile.
    """

    def __init__(self, shapes: Sequence[GraphConfig], branch: int) -> None:
        self.shapes = tuple(shapes)
        self.branch = branch
        depth = np.array([s.depth for s in shapes])
        self.levels = max((s.depth + s.history_depth for s in shapes), default=0)
        self.width = max((max(s.width if s.depth else 1, s.history_width) for s in shapes), default=1)
        level = np.arange(self.levels)
        total = depth + np.array([s.history_depth for s in shapes])
        width = np.where(
            level < depth[:, None],
            np.array([s.width for s in shapes])[:, None],
            np.array([s.history_width for s in shapes])[:, None],
        )
        width = np.where(level == 0, 1, width) * (level < total[:, None])  # [S, L]; nodes that a level expands
        self.modelled = level < depth[:, None]  # [S, L]
        self.expands = np.arange(self.width) < width[:, :, None]  # [S, L, W]
        ranks = np.arange(branch) < np.array([s.branch for s in shapes])[:, None]  # [S, K]
        self.mask = (self.expands[..., None] & ranks[:, None, None, :]).astype(np.float32)  # [S, L, W, K]
        self.draws = np.random.default_rng(0).integers(1 << 30, size=(TREES, self.levels, self.width))
        self.last_row = np.array([s.max_rows for s in shapes]) - 1
        self.predictions = 0

    def tokens(self, pools: Mapping[str, np.ndarray]) -> np.ndarray:
        """Predicted tokens per step by shape, float64 [S]; pools [n, K] by name."""
        self.predictions += 1
        count = len(self.shapes)
        bank = np.concatenate([pools["model"], pools["lookup"]]).astype(np.float32)
        by_model = self.draws % len(pools["model"])  # [T, L, W]
        by_lookup = len(pools["model"]) + self.draws % len(pools["lookup"])
        index = np.where(self.modelled[:, None, :, None], by_model, by_lookup)  # [S, T, L, W]
        profiles = bank[index] * self.mask[:, None]  # [S, T, L, W, K]
        open_nodes = profiles[:, :, 0, 0]  # [S, T, n]; path probabilities
        nodes = [open_nodes]
        for level in range(1, self.levels):
            ranked = -np.sort(-open_nodes, axis=-1)
            frontier, rest = ranked[..., : self.width], ranked[..., self.width : OPEN]
            wide = frontier.shape[-1]
            children = (frontier[..., None] * profiles[:, :, level, :wide]).reshape(count, TREES, -1)
            nodes.append(children)
            left = np.where(self.expands[:, None, level, :wide], 0.0, frontier)
            open_nodes = np.concatenate([left, rest, children], -1)
        best = -np.sort(-np.concatenate(nodes, -1), axis=-1)
        by_rows = best.mean(1, dtype=float).cumsum(-1)  # [S, n]
        return 1.0 + by_rows[np.arange(count), np.minimum(self.last_row, by_rows.shape[1]) - 1]


def padded(profile: tuple[float, ...], branch: int) -> np.ndarray:
    out = np.zeros(branch)
    out[: len(profile)] = profile[:branch]
    return out
