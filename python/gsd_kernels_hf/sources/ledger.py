"""The ledger of draft sources, by what the target picked: weights beside others, counts, and who is left out.

Weights lie on the device and are updated in place; nothing there waits for it, so that a step can be captured. They
sink back to their priors by what was observed since, see :func:`gsd_kernels.ops.learn.learn_source`. Counts are of
steps in the host's memory. Which sources the next generation takes is decided at the borders of generations, by the
weights alone: the sources of a session and of its captured steps are fixed, and a source that comes back begins its
text as in any other session. All of it changes the speed, never the output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gsd_kernels.graph import Rows
from gsd_kernels.ops.learn import Asked, Mixture, learn_source

from ..records import Verified
from .base import DraftSource

PRIOR_COUNT = 8.0  # observations that the starting values of weights count for
MEMORY_COUNT = 400.0  # observations after which an older one counts 1/e
MIN_SHARE = 0.2  # of the picked tokens of the best source that forwards a model, at least, to be kept
MIN_PICKS = 64.0  # tokens picked by the target that a source is judged by, at least
WAIT_STEPS = 1024  # until a source that was left out is tried again


T = TypeVar("T")


@dataclass
class SourceStats:
    """The counts of one draft source.

    Attributes:
        proposed: drafted tokens that the target verified. One that several sources proposed counts for the first of
            them, in the order in which they are mixed.
        accepted: those of them that were accepted.
        seconds: of proposing and learning, a part of ``seconds["draft"]``, whose rest is merging and unrolling.

    All are ``None`` on a GPU, where counting would slow down every step.
    """

    proposed: int | None = None
    accepted: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        if self.proposed is None or self.accepted is None or self.seconds is None:
            return "not counted on a GPU"
        share = f" ({self.accepted / self.proposed:.0%})" if self.proposed else ""
        return f"{self.accepted:,} of {self.proposed:,} tokens accepted{share}, {self.seconds:.3f} s"


class SourceWeights:
    """The weights w in P = (1 − w) · P(sources before it) + w · P(this one) of one source, by ``Proposal.index``.

    Args:
        shares: prior; where it is 0 it stays 0.
        device: of the tables.
    """

    def __init__(self, shares: Sequence[float], device: torch.device) -> None:
        prior = torch.tensor(shares, dtype=torch.float32, device=device)  # [n]
        self.mixture = Mixture(prior, PRIOR_COUNT * prior, torch.full_like(prior, PRIOR_COUNT), prior.clone())

    def learn(self, asked: Sequence[Asked], nodes: Tensor, picked: Tensor, backend: str = "auto") -> None:
        """Update by the target's picks, int32 [B, P], after nodes of the accepted path."""
        mixed = [level for level in asked if level.first_tokens is not None]
        if mixed:
            counts = {"prior_count": PRIOR_COUNT, "memory": MEMORY_COUNT}
            learn_source(mixed, nodes, picked, self.mixture, **counts, backend=backend)

    def learned(self) -> tuple[float, float]:
        """Picked tokens by which the weights were learned, and which share of them was this source's.

        Without the prior, which an unseen source has of it; (0, 0) where nothing was seen. Waits for the device.
        """
        start, shares, counts, _ = (table.tolist() for table in self.mixture)
        picked = sum(counts) - PRIOR_COUNT * len(counts)
        mine = sum(shares) - PRIOR_COUNT * sum(start)
        return (picked, min(1.0, max(0.0, mine / picked))) if picked > 0 else (0.0, 0.0)

    def forget(self) -> None:
        """Go back to the priors."""
        start, shares, counts, weights = self.mixture
        shares.copy_(PRIOR_COUNT * start)
        counts.fill_(PRIOR_COUNT)
        weights.copy_(start)

    def copy_(self, other: SourceWeights) -> None:
        """Copy the tables of ``other`` into these."""
        for mine, theirs in zip(self.mixture, other.mixture, strict=True):
            mine.copy_(theirs)


class Tally:
    """Counts by source, on the host, of steps in the host's memory; on a GPU they would cost launches in every step.

    A drafted token counts for the first source, in the order in which they are mixed, that proposed it after its
    parent. So what a later source brings is what it adds to those before it, and the sums are those of all rows.

    Args:
        names: of the sources, in that order.
        counts: whether steps are in the host's memory.

    Attributes:
        sources: their counts by name.
    """

    def __init__(self, names: Sequence[str], *, counts: bool) -> None:
        self.names, self.counts = tuple(names), counts
        self.restart()

    def restart(self) -> None:
        """Begin a text."""
        self.sources = {name: SourceStats(0, 0, 0.0) if self.counts else SourceStats() for name in self.names}

    def timed(self, name: str, work: Callable[..., T], *arguments: Any) -> T:
        """Do a source's work and count its seconds."""
        begin = time.perf_counter()
        done = work(*arguments)
        if (brought := self.sources[name]).seconds is not None:
            brought.seconds += time.perf_counter() - begin
        return done

    def count(self, asked: Mapping[str, Sequence[Asked]], verified: Verified) -> None:
        """Count a step that drafted.

        Args:
            asked: what the sources proposed, by name, in the order in which they are mixed.
            verified: the step; after it, since the step itself waits for nothing.
        """
        proposing = [name for name, levels in asked.items() if levels]
        if not self.counts or not proposing or verified.graph is None:
            return
        paths, lengths = verified.accepted.accepted_rows.tolist(), verified.accepted.num_accepted.tolist()
        for sequence, (rows, accepted) in enumerate(zip(verified.rows.num_rows.tolist(), lengths, strict=True)):
            if not accepted:
                continue  # a finished sequence verifies nothing
            left, path = set(range(1, rows)), set(paths[sequence][1:accepted])
            edges = _edges(verified.rows, sequence) if len(proposing) > 1 else []
            for name in proposing:
                mine = left
                if name != proposing[-1]:
                    proposed = _proposed(asked[name], sequence)
                    mine = {row for row in left if edges[row] in proposed}
                left, brought = left - mine, self.sources[name]
                brought.proposed = (brought.proposed or 0) + len(mine)
                brought.accepted = (brought.accepted or 0) + len(mine & path)


def _edges(rows: Rows, sequence: int) -> list[tuple[int, int]]:
    """Parent node and token of every row of a sequence; the root's say nothing."""
    parts = rows.token_ids, rows.parent_rows, rows.node_ids
    tokens, parents, nodes = (part[sequence].tolist() for part in parts)
    return [(nodes[parent], token) for parent, token in zip(parents, tokens, strict=True)]


def _proposed(asked: Sequence[Asked], sequence: int) -> set[tuple[int, int]]:
    """Nodes of a sequence, each with a token that was proposed after it."""
    return {
        (node, token)
        for level in asked
        for node, after in zip(level.node_ids[sequence].tolist(), level.tokens[sequence].tolist(), strict=True)
        for token in after
    }


class Retention:
    """A record of the sources that are left out for now, and for how long."""

    def __init__(self) -> None:
        self.wait: dict[str, int] = {}  # steps left until a source is tried again, by name

    def staying(self, sources: Sequence[DraftSource]) -> list[DraftSource]:
        """The ``sources`` that the next generation takes; of those that forward a model, one at least."""
        staying = [source for source in sources if source.name not in self.wait]
        # Calls that overlap may have left out one source each.
        return staying if any(source.forwards for source in staying) else list(sources)

    def observe(self, sources: Sequence[DraftSource], weights: Mapping[str, SourceWeights], steps: int) -> None:
        """Learn from a generation (waits for the device).

        Args:
            sources: that it took, in the order in which they were mixed.
            weights: what is known of them since, by name; of one that is left out it is forgotten, in place.
            steps: number of steps that it took.
        """
        self.wait = {name: left - steps for name, left in self.wait.copy().items() if left > steps}
        expensive = [source for source in sources if source.forwards]
        if len(expensive) < 2:
            return
        # P = (1 − w) · P(sources before it) + w · P(this one): a source's share is its w times 1 − w of all after it.
        first, shares, picks, rest = sources[0].name, {}, {}, 1.0
        for name in (source.name for source in reversed(sources[1:])):
            picks[name], share = weights[name].learned()
            shares[name], rest = rest * share, rest * (1.0 - share)
        # The others' weights are relative to the first source.
        names = [source.name for source in expensive]
        shares[first], picks[first] = rest, max(picks[name] for name in names if name != first)
        best = max(shares[name] for name in names)
        for name in names:
            if picks[name] >= MIN_PICKS and shares[name] < MIN_SHARE * best:
                self.wait[name] = WAIT_STEPS
                for forgotten in names if name == first else [name]:  # else it could not show that it became better
                    weights[forgotten].forget()
