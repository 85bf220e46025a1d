"""How often drafted candidates are accepted, and how many tokens a shape should therefore gain."""

from __future__ import annotations

import numpy as np
import torch

from ..sources.weights import Calibration
from .tuning import DEPTHS

POOL = 64  # profiles kept
FORGET = 0.998  # of what was counted, a step
TREES = 12  # trees grown for a prediction
# Acceptance by rank, before anything was seen: of a model with all other sources, and of those that cost no forward.
PRIORS = {"all": (0.62, 0.12, 0.06, 0.04), "free": (0.4, 0.08, 0.04, 0.02)}


class Pool:
    """Candidate probabilities that were seen lately, calibrated."""

    def __init__(self, prior: tuple[float, ...], branch: int) -> None:
        self.profiles = np.tile(padded(prior, branch), (POOL, 1))  # [POOL, K]; newest overwrite
        self.seen = 0
        self.ratio = 1.0  # observed over predicted tokens beyond the first

    def add(self, probs: np.ndarray) -> None:
        """[n, K']"""
        for profile in probs:
            row = self.profiles[self.seen % POOL]
            row[: len(profile)] = profile
            row[len(profile) :] *= 0.5  # a wider shape would have had something there
            self.seen += 1


class AcceptanceModel:
    """How often a drafted candidate is what the target picks, by rank and draft probability; forgets slowly."""

    def __init__(self, branch: int) -> None:
        self.branch = branch
        bins = len(Calibration.EDGES) + 1
        # Hits, and hits expected by the draft. Start out by believing the draft, with the weight of a few hits.
        self.hits = np.full((branch, bins), 3.0)
        self.expected = np.full((branch, bins), 3.0)
        self.pools = {name: Pool(prior, branch) for name, prior in PRIORS.items()}

    def observe(self, name: str, probs: np.ndarray, hits: np.ndarray) -> None:
        """Candidates after accepted nodes as proposed by ``name``'s sources, and whether each was picked, [n, K]."""
        if not len(probs):
            return
        if name == "all":
            ranks, bins = self._cells(probs)
            self.hits, self.expected = _forget(self.hits, 3.0), _forget(self.expected, 3.0)
            np.add.at(self.hits, (ranks, bins), hits.astype(float))
            np.add.at(self.expected, (ranks, bins), probs)
            probs = np.minimum(probs * (self.hits / self.expected)[ranks, bins], 1.0)
        self.pools[name].add(probs)

    def write(self, calibration: Calibration | None) -> None:
        """Put the current ratios into the device table."""
        if calibration is not None:
            table = torch.from_numpy(np.log(self.hits / self.expected)).float()
            calibration.log_ratio.copy_(table[: calibration.log_ratio.shape[0]], non_blocking=True)

    def _cells(self, probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ranks = np.broadcast_to(np.arange(probs.shape[1]), probs.shape)
        return ranks, np.searchsorted(Calibration.EDGES, probs)

    def tokens(self, width: int, branch: int, pool: np.ndarray) -> dict[int, np.ndarray]:
        """Predicted tokens per step by depth: an array by rows, entry r − 1 for r rows. pool [n, K]."""
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


def _forget(counts: np.ndarray, prior: np.ndarray | float) -> np.ndarray:
    return prior + (counts - prior) * FORGET


def padded(profile: tuple[float, ...], branch: int) -> np.ndarray:
    out = np.zeros(branch)
    out[: len(profile)] = profile[:branch]
    return out
