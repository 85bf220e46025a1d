"""A memory of what was accepted lately, and the predicted tokens of a step of any shape.

Tokens per step are predicted by growing small trees over what was decoded last: from the candidate probabilities that
were seen there, after calibration (how often a candidate of this rank and this probability was the target's pick), and
from what was picked. What steps really emitted corrects the prediction, for shapes with and without a draft model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gsd_kernels import GraphConfig

from .. import numbers
from ..sources.weights import Calibration

MAX_HITS = 1e12  # a count beyond it is none
MISS, UNKNOWN = -1, -2  # in the place of a rank


class KindPrior(NamedTuple):
    """Prior of one kind of levels, before anything was observed.

    Attributes:
        accepted_by_rank: probability that a candidate is the target's pick, best rank first.
        hits: number of hits, and of expected hits, by which every cell of the calibration table starts.
        tokens: number of tokens, predicted and accepted, by which the ratio of a kind starts at 1.
    """

    accepted_by_rank: tuple[float, ...]
    hits: float
    tokens: float


PRIORS = {
    "model": KindPrior((0.62, 0.12, 0.06, 0.04), 6.0, 10.0),  # a draft model with all other sources
    "lookup": KindPrior((0.4, 0.08, 0.04, 0.02), 3.0, 16.0),  # sources that cost no forward
}
EASY_BY_RANK = (0.95, 0.03, 0.01, 0.005)  # acceptance in an easy text: what speculation could reach at best
MAX_PROFILES = 96  # kept of a kind, the newest
PRIOR_PROFILES = 4  # copies of the prior that a pool starts with
MIN_PROFILES = 22  # observed ones that replace the prior; from then on predictions are held against what came of them
TABLE_DECAY_PER_STEP, RATIO_DECAY_PER_STEP = 0.998, 0.99  # weight of earlier counts, and of earlier tokens of a kind
TREES = 24  # grown for a prediction
MIN_OPEN_NODES = 24  # unexpanded nodes that a tree keeps, at least


def kind_of(config: GraphConfig) -> str:
    """``"model"`` for a shape with levels that a draft model expands, ``"lookup"`` for one without."""
    return "model" if config.depth else "lookup"


class Pool(NamedTuple):
    """Profiles: candidate probabilities after accepted tokens, in the order of the text.

    Another one takes its place where something is learned: calls that overlap in time share them.

    Attributes:
        profiles: candidate probabilities, calibrated, [n, K], at most ``MAX_PROFILES``, the oldest first.
        picks: rank of the candidate that was picked, :data:`MISS` for none, :data:`UNKNOWN` in a prior; int [n].
    """

    profiles: np.ndarray
    picks: np.ndarray

    @classmethod
    def of(cls, profiles: np.ndarray) -> Pool:
        """Profiles [n, K] of which nobody knows what was picked."""
        return cls(profiles, np.full(len(profiles), UNKNOWN))

    @classmethod
    def prior(cls, profile: tuple[float, ...], branch: int, count: int = PRIOR_PROFILES) -> Pool:
        """``count`` times a profile, cut or padded to ``branch``."""
        return cls.of(np.tile(np.pad(profile, (0, branch))[:branch], (count, 1)))

    def grown(self, probs: np.ndarray, hits: np.ndarray) -> Pool:
        """With candidates after more accepted nodes and whether each was picked, [n, K'] both."""
        new = np.zeros((len(probs), self.profiles.shape[1]))
        new[:, : probs.shape[1]] = probs
        # A wider shape would have had something there: half of the rank before, as in the priors, if so much is left.
        for rank in range(probs.shape[1], new.shape[1]):
            new[:, rank] = 0.5 * np.minimum(new[:, rank - 1], np.maximum(1.0 - new[:, :rank].sum(1), 0.0))
        profiles = np.concatenate([self.profiles, new])
        picks = np.concatenate([self.picks, np.where(hits.any(1), hits.argmax(1), MISS)])
        if (seen := picks != UNKNOWN).sum() >= MIN_PROFILES:  # drop the prior
            profiles, picks = profiles[seen], picks[seen]
        return Pool(profiles[-MAX_PROFILES:], picks[-MAX_PROFILES:])


class AcceptanceModel:
    """How often a drafted candidate is what the target picks, by rank and draft probability; forgets slowly.

    Threads share it without a lock: one may take another's last observation back, and none sees half of one.
    """

    def __init__(self, branch: int) -> None:
        self.branch = branch
        # Hits, and hits expected by the sources, [branch, bins]; at first equal, with the weight of a few hits.
        self.hits = {kind: np.full((branch, len(Calibration.EDGES) + 1), prior.hits) for kind, prior in PRIORS.items()}
        self.expected = {name: table.copy() for name, table in self.hits.items()}
        self.counted = object()  # another one whenever the counts have changed
        self.forget()

    def forget(self) -> None:
        """Forget what was accepted lately; the calibration table is kept."""
        self.pools = {kind: Pool.prior(prior.accepted_by_rank, self.branch) for kind, prior in PRIORS.items()}
        # Tokens beyond the first, accepted and predicted: by kind of shape, decayed sums.
        self.accepted: dict[str, tuple[float, float]] = {}

    def observe(self, name: str, probs: np.ndarray, hits: np.ndarray, *, steps: int = 1) -> None:
        """Candidates after accepted nodes of some steps, by a pool's sources, and whether each was picked, [n, K]."""
        if not len(probs):
            return
        probs, hits = probs[:, : self.branch].astype(float), hits[:, : self.branch].astype(bool)
        cells = _cells(probs)
        for table, counts in ((self.hits[name], hits), (self.expected[name], probs)):
            # Towards the prior, not towards 0: hits / expected never rests on nothing.
            table += (PRIORS[name].hits - table) * (1.0 - TABLE_DECAY_PER_STEP**steps)
            np.add.at(table, cells, counts.astype(float))
        self.counted = object()
        self.pools[name] = self.pools[name].grown(self.calibrated(name, probs), hits)

    def calibrated(self, name: str, probs: np.ndarray) -> np.ndarray:
        """Probabilities [n, K] as often as candidates of such ranks and probabilities were picked."""
        return np.minimum(probs * (self.hits[name] / self.expected[name])[_cells(probs)], 1.0)

    def observe_accepted(self, kind: str, accepted: float, predicted: float) -> None:
        """Accepted tokens of a step, mean of its sequences, and the tokens that :meth:`tokens` had predicted."""
        if len(self.pools[kind].profiles) < MIN_PROFILES:  # predicted by the prior: nothing of the shape
            return
        # Before its correction, which would else be learned from itself.
        before = (predicted - 1.0) / max(self.ratio(kind), 1e-3)
        observed, expected = self.accepted.get(kind, (0.0, 0.0))
        self.accepted[kind] = RATIO_DECAY_PER_STEP * observed + accepted, RATIO_DECAY_PER_STEP * expected + before

    def ratio(self, kind: str) -> float:
        """Accepted over predicted tokens beyond the first, of shapes of a kind."""
        return (PRIORS[kind].tokens + self.accepted.get(kind, (0.0, 0.0))[0]) / self.evidence(kind)

    def evidence(self, kind: str) -> float:
        """Number of predicted tokens that :meth:`ratio` rests on, those of its prior included."""
        return PRIORS[kind].tokens + self.accepted.get(kind, (0.0, 0.0))[1]

    def assume_easy(self, kind: str) -> None:
        """For a retry: forget what a kind of shape had accepted lately, and expect an easy text until one is seen."""
        self.pools[kind] = Pool.prior(EASY_BY_RANK, self.branch, 1)
        self.accepted.pop(kind, None)

    def write(self, calibration: Calibration | None) -> None:
        """Put the current ratios into the device table, unless they are there."""
        if calibration is not None and calibration.written is not self.counted:
            table = torch.from_numpy(np.log(self.hits["model"] / self.expected["model"])).float()
            calibration.log_ratio.copy_(table[: calibration.log_ratio.shape[0]], non_blocking=True)
            calibration.written = self.counted

    def tokens(self, forecast: TreeForecast) -> tuple[np.ndarray, np.ndarray]:
        """Predicted tokens per step and rows of every shape of ``forecast``, float64 [S] each."""
        grown, rows = forecast.predict(self.pools)
        ratios = [self.ratio(kind_of(config)) for config in forecast.shapes]
        return 1.0 + np.minimum((grown - 1.0) * np.array(ratios), forecast.deepest), rows

    def easy_tokens(self, forecast: TreeForecast, kinds: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Predicted tokens and rows, without :meth:`ratio`, on a text that is easy for the sources of these kinds."""
        easy = Pool.prior(EASY_BY_RANK, self.branch, 1)
        return forecast.predict({name: easy if name in kinds else pool for name, pool in self.pools.items()})

    def as_dict(self) -> dict[str, Any]:
        """All of it, for the disk."""
        return {
            **{part: {kind: n.tolist() for kind, n in getattr(self, part).items()} for part in ("hits", "expected")},
            "pools": {name: [p.profiles.tolist(), p.picks.tolist()] for name, p in self.pools.items()},
            "accepted": {name: list(pair) for name, pair in self.accepted.copy().items()},
        }

    def load(self, data: Mapping[str, Any]) -> None:
        """Load what :meth:`as_dict` gave.

        Raises:
            ValueError, KeyError, TypeError: it is not that; nothing was taken over.
        """
        size = self.hits["model"].shape
        hits, expected = (  # a count begins with its prior's, and never falls below it
            {kind: numbers.array(part, data[part][kind], size, 0.999 * p.hits, MAX_HITS) for kind, p in PRIORS.items()}
            for part in ("hits", "expected")
        )
        pools = {}
        for kind in PRIORS:
            profiles, picks = data["pools"][kind]
            rows = numbers.array("profiles", profiles, (None, self.branch), 0.0, 1.0)
            ranks = numbers.array("picks", picks, (len(rows),), UNKNOWN, self.branch - 1)
            if not 0 < len(rows) <= MAX_PROFILES or (ranks % 1).any():
                raise ValueError("pools: of another size, or picks that are no ranks")
            pools[kind] = Pool(rows, ranks.astype(int))
        accepted = {}
        for kind, pair in numbers.table("accepted", data["accepted"], list).items():
            if kind not in PRIORS:
                raise ValueError("accepted: of other kinds")
            # Less than a token could cancel what a kind begins with.
            observed, predicted = numbers.array("accepted", pair, (2,), -1.0, MAX_HITS).tolist()
            accepted[kind] = observed, predicted
        self.hits, self.expected, self.pools, self.accepted = hits, expected, pools, accepted
        self.counted = object()


class TreeForecast:
    """Trees of several shapes, grown side by side over the places of a text that was just decoded.

    A tree begins at one of ``TREES`` places of the pools and goes on with the profiles that followed there,
    the same for all nodes of a level, so that runs of easy tokens stay runs. A shape's first ``depth`` levels read the
    pool ``"model"``, its history levels ``"lookup"``. A prediction is the mean of what the candidates' probabilities
    promise and of what the tree would have had accepted there. Merging is not modelled.

    Args:
        shapes: S of them.
        branch: candidates in a profile.
    """

    def __init__(self, shapes: Sequence[GraphConfig], branch: int) -> None:
        self.shapes = tuple(shapes)
        sizes = [
            (s.depth, s.history_depth, s.width if s.depth else 1, s.history_width, s.branch, s.max_rows) for s in shapes
        ]
        depth, more, width, more_width, branches, rows = np.array(sizes).T[..., None]  # [S, 1] each
        total = depth + more
        self.levels = int(total.max())
        level = np.arange(self.levels)
        self.modelled, self.inside = level < depth, level < total  # [S, L]
        # Nodes that a level expands, [S, L].
        widths = np.where(level == 0, 1, np.where(self.modelled, width, more_width)) * self.inside
        self.ranks = np.arange(branch) < branches  # [S, K]
        # Trees that differ in rows or in how many levels the history adds are one tree, grown once: F families.
        trees = np.hstack([depth, width, branches, more_width])
        self.family = np.unique(trees, axis=0, return_inverse=True)[1].ravel()  # [S]
        families = [np.flatnonzero(self.family == f) for f in range(self.family.max() + 1)]
        # A shape of each, which has all levels of the others.
        self.grown = np.array([family[total[family, 0].argmax()] for family in families])  # [F]
        self.width = int(widths.max())
        self.expands = np.arange(self.width) < widths[self.grown, :, None]  # [F, L, W]
        self.deepest = total[:, 0]  # [S]; tokens beyond the first that a step brings at most
        self.last_row = rows[:, 0] - 1
        self.open = max(MIN_OPEN_NODES, int(self.last_row.max()) // 2)

    def predict(self, pools: Mapping[str, Pool]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens per step and rows by shape, float64 [S] each."""
        model, lookup = pools["model"], pools["lookup"]
        index = np.where(
            self.modelled[:, None], self._places(len(model.picks)), len(model.picks) + self._places(len(lookup.picks))
        )  # [S, T, L]
        profiles = np.concatenate([model.profiles, lookup.profiles]).astype(np.float32)[index]  # [S, T, L, K]
        profiles *= self.ranks[:, None, None, :]
        picks = np.concatenate([model.picks, lookup.picks])[index]  # [S, T, L]
        best = self._best(self._grow(profiles[self.grown]))  # [S, T, rows]
        shape = np.arange(len(self.shapes))
        last = np.minimum(self.last_row, best.shape[-1]) - 1
        # Two estimates for every tree. What its rows' probabilities promise is smooth, and wrong where they all are;
        # how deep the picks of the text lie among its rows is true, and rests on few places.
        promised = best.cumsum(-1, dtype=float)[shape, :, last]  # [S, T]
        kept = np.minimum((best > 0).sum(-1), last[:, None] + 1)  # [S, T]
        # What was picked there is among the rows if its path is no less likely than the last of them. Its product may
        # be rounded otherwise than the tree's, hence 1e-5; by 1e-30 a path of probability 0 is no row.
        path = np.take_along_axis(profiles, np.maximum(picks, 0)[..., None], -1)[..., 0].cumprod(-1)
        least = np.take_along_axis(best, np.maximum(kept - 1, 0)[..., None], -1)[..., 0]
        least = np.maximum(least * (1.0 - 1e-5), 1e-30)
        accepted = ((picks >= 0) & self.inside[:, None] & (path >= least[..., None])).cumprod(-1).sum(-1)  # [S, T]
        # Behind a miss nothing would have been accepted; an unknown pick before one leaves the promise alone.
        missed = (picks == MISS).cumsum(-1) > 0
        known = ((picks != UNKNOWN) | missed | ~self.inside[:, None]).all(-1)
        predicted = np.where(known, 0.5 * (promised + accepted), promised)
        return 1.0 + predicted.mean(1), 1.0 + kept.mean(1)

    def _places(self, count: int) -> np.ndarray:
        """Where in a pool of ``count`` profiles the levels of every tree look: [T, L]."""
        return (np.arange(TREES)[:, None] * count // TREES + np.arange(self.levels)) % count

    def _grow(self, profiles: np.ndarray) -> list[np.ndarray]:
        """Path probabilities of the nodes of every tree, [F, T, L, K] → [F, T, nodes], level by level."""
        open_nodes = profiles[:, :, 0]
        nodes = [open_nodes]
        for level in range(1, self.levels):
            # A later level may expand what this one leaves; the likeliest ``open`` of it are enough for a forecast.
            ranked = -np.sort(-open_nodes, axis=-1)
            frontier, rest = ranked[..., : self.width], ranked[..., self.width : self.open]
            expands = self.expands[:, None, level, : frontier.shape[-1]]
            children = (frontier * expands)[..., None] * profiles[:, :, level, None]  # [F, T, W, K]
            children = children.reshape(*children.shape[:2], -1)
            nodes.append(children)
            open_nodes = np.concatenate([np.where(expands, 0.0, frontier), rest, children], -1)
        return nodes

    def _best(self, levels: Sequence[np.ndarray]) -> np.ndarray:
        """Path probabilities of every shape's likeliest nodes, descending: [F, T, nodes] by level → [S, T, rows]."""
        counts = [nodes.shape[-1] for nodes in levels]
        inside = np.repeat(self.inside, counts, axis=1)  # [S, nodes]
        probs = np.concatenate(levels, -1)[self.family] * inside[:, None]
        most = max(int(self.last_row.max()), 1)
        if probs.shape[-1] > most:  # sorting the few that count is cheaper
            probs = -np.partition(-probs, most - 1, axis=-1)[..., :most]
        return -np.sort(-probs, axis=-1)


def _cells(probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rank and bin of every probability, [n, K] each."""
    return np.broadcast_to(np.arange(probs.shape[1]), probs.shape), np.searchsorted(Calibration.EDGES, probs)
