"""How many tokens a step of any shape would bring, learned from how many the last steps brought.

A step is as easy as the chance that a drafted candidate is right: ``q`` where a draft model expands the level, and
another one where a source does that forwards nothing. Texts are easy in runs and hard between them, so what is learned
is how the steps are distributed over a grid of both, each step its share of the posterior (online expectation
maximisation of a mixture). A tree of every shape, grown for every place of the grid, says how likely each number of
accepted tokens is there. Merging is not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from gsd_kernels import GraphConfig

CHANCES = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98])  # of the best candidate to be right
SIBLING = 0.5  # of what a candidate leaves, the next one's chance is this share of its own
PLACES = len(CHANCES) ** 2
GRID = np.array(np.meshgrid(CHANCES, CHANCES, indexing="ij")).reshape(2, PLACES)  # of a model's levels, of others
USUAL = 0.62, 0.4  # chances that a pair begins with; so far from them the prior falls to 1/√e
PRIOR_STD = 0.35
EASY = 0.94  # chance in an easy text: what speculation could reach at best
PRIOR_STEPS, KNOWN_STEPS, MOST_STEPS = 3.0, 8.0, 40.0  # that the prior, what earlier texts left, and all count for
RATIO_TOKENS, RATIO_DECAY = 3.0, 0.97  # tokens that the ratio of accepted to predicted ones begins with; a step's decay


class Acceptance:
    """How easy steps were lately. Threads share it without a lock: one may take another's last observation back.

    Args:
        shapes: S of them.
    """

    def __init__(self, shapes: Sequence[GraphConfig]) -> None:
        found = [tree_of(shape) for shape in shapes]
        deepest = max(len(tails[0]) for tails, _ in found)
        self.tails = np.stack([np.pad(tails, ((0, 0), (0, deepest - len(tails[0])))) for tails, _ in found])
        self.kept = np.stack([rows for _, rows in found])  # [S, PLACES]
        near = np.exp(-0.5 * (((GRID - np.array(USUAL)[:, None]) / PRIOR_STD) ** 2).sum(0))
        self.share, self.steps = near / near.sum(), PRIOR_STEPS  # a distribution over the grid, [PLACES]
        self.came = np.zeros(2)  # drafted tokens that were accepted, and that were predicted to be, of late

    def count_less(self) -> None:
        """Let the next steps count for more, as of another text: all before them for :data:`KNOWN_STEPS`."""
        self.steps = min(self.steps, KNOWN_STEPS)

    def hope(self, part: float, *, lookups: bool) -> None:
        """Believe by ``part`` more that levels of a model are easy, with ``lookups`` all others: no step shows them."""
        old = self.share.reshape(len(CHANCES), -1)
        easy = (CHANCES == EASY).astype(float)
        hoped = np.outer(easy, easy if lookups else old.sum(0))
        self.share = ((1.0 - part) * old + part * hoped).ravel()
        self.came *= 1.0 - part

    def observe(self, shape: int, tokens: Sequence[int], rows: int) -> None:
        """Learn from a step of a shape, which brought so many tokens by sequence."""
        tails = self.tails[shape]  # [PLACES, most accepted + 1]
        for count in tokens:
            most = min(count - 1, int(np.flatnonzero(tails.any(0))[-1]))
            beyond = tails[:, most + 1] if most + 1 < tails.shape[1] else 0.0
            self.came = RATIO_DECAY * self.came + [most, (tails[:, 1:].sum(1) @ self.share)]
            posterior = self.share * (tails[:, most] - beyond) + 1e-12
            self.steps = min(self.steps + 1.0, MOST_STEPS)
            self.share = self.share + (posterior / posterior.sum() - self.share) / self.steps

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that a step of each shape brings, and the rows that it has, [S] each."""
        accepted, predicted = self.came + RATIO_TOKENS
        return 1.0 + accepted / predicted * (self.tails[..., 1:].sum(-1) @ self.share), self.kept @ self.share

    def arrays(self) -> dict[str, np.ndarray]:
        """All that is kept on disk, in place."""
        return {"share": self.share}


@cache
def tree_of(shape: GraphConfig) -> tuple[np.ndarray, np.ndarray]:
    """Grow a shape's tree at every place of the grid: the likeliest nodes are expanded, and the likeliest kept.

    Returns:
        The chance that at least 0, 1, 2, … drafted tokens are accepted [PLACES, levels + 1], and rows [PLACES].
    """
    probs, depths = np.ones((PLACES, 1)), np.zeros((PLACES, 1), dtype=int)
    unexpanded = np.ones((PLACES, 1), dtype=bool)
    levels = shape.depth + shape.history_depth
    for level in range(levels):
        first = GRID[0 if level < shape.depth else 1]
        left, ranks = 1.0 - first, [first]
        for _ in range(shape.branch - 1):
            ranks.append(left * first * SIBLING)
            left = left - ranks[-1]
        width = 1 if level == 0 else shape.width if level < shape.depth else shape.history_width
        frontier = np.argsort(-(probs * unexpanded), 1, kind="stable")[:, :width]
        parents = np.take_along_axis(probs * unexpanded, frontier, 1)  # [PLACES, width]
        below = np.take_along_axis(depths, frontier, 1) + 1
        np.put_along_axis(unexpanded, frontier, False, 1)
        children = np.concatenate([parents * chance[:, None] for chance in ranks], 1)
        probs, depths = np.hstack([probs, children]), np.hstack([depths, np.tile(below, shape.branch)])
        unexpanded = np.hstack([unexpanded, np.ones_like(children, dtype=bool)])
    kept = np.argsort(-probs, 1, kind="stable")[:, : shape.max_rows]
    probs, depths = np.take_along_axis(probs, kept, 1), np.take_along_axis(depths, kept, 1)
    tails = np.stack([(probs * (depths == depth)).sum(1) for depth in range(levels + 1)], 1)
    return tails, (probs > 0).sum(1).astype(float)
