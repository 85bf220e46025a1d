"""What each source brought to a text: drafted tokens that were verified, those that were accepted, and seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gsd_kernels.ops.learn import Asked

from ..records import Verified


class Tally:
    """Counts by source, on the device: nothing waits for it.

    A drafted token counts for the first source, in the order in which they are mixed, that proposed it after its
    parent. So what a later source brings is what it adds to those before it, and the sums are those of all rows.

    Args:
        names: of the sources, in that order.
        device: of the text.
        timed: whether the host can time a source: not where the device works on behind it.

    Attributes:
        counts: int64 [sources, 2]: rows verified without the roots, and of these the accepted ones.
        seconds: of proposing and learning, by source; ``None``: not timed.
    """

    def __init__(self, names: Sequence[str], device: torch.device, *, timed: bool) -> None:
        self.place = {name: i for i, name in enumerate(names)}
        self.counts = torch.zeros(len(self.place), 2, dtype=torch.int64, device=device)
        self.seconds = dict.fromkeys(self.place, 0.0) if timed else None

    def restart(self) -> None:
        """Begin a text, in place."""
        self.counts.zero_()
        if self.seconds is not None:
            self.seconds = dict.fromkeys(self.place, 0.0)

    def begin(self) -> float:
        """When a source's work begins."""
        return 0.0 if self.seconds is None else time.perf_counter()

    def end(self, name: str, begin: float) -> None:
        """Its end."""
        if self.seconds is not None:
            self.seconds[name] += time.perf_counter() - begin

    def count(self, asked: Mapping[str, Sequence[Asked]], verified: Verified) -> None:
        """Count a step that drafted.

        Args:
            asked: what the sources proposed, by name, in the order in which they are mixed; none without a level.
            verified: the step.
        """
        rows, accepted = verified.rows, verified.accepted.num_accepted
        if not asked:
            return
        *others, last = asked
        if not others:
            drafted = torch.where(accepted > 0, rows.num_rows - 1, 0).sum()  # a finished sequence verifies nothing
            self._add(last, drafted, (accepted - 1).clamp(min=0).sum())
            return
        place = torch.arange(rows.node_ids.shape[1], device=accepted.device)
        left = (place > 0) & (place < rows.num_rows[:, None]) & (accepted > 0)[:, None]  # [B, R]
        path = (verified.accepted.accepted_rows[:, :, None] == place).any(1)  # [B, R]
        parents = rows.node_ids.gather(1, rows.parent_rows.clamp(min=0).long())
        edges = _edges(parents, rows.token_ids)[:, :, None]  # [B, R, 1]
        for name in others:
            proposed = torch.cat([_edges(a.node_ids[..., None], a.tokens).flatten(1) for a in asked[name]], 1)
            mine = (edges == proposed[:, None]).any(2) & left  # [B, R]
            self._add(name, mine.sum(), (mine & path).sum())
            left = left & ~mine
        self._add(last, left.sum(), (left & path).sum())

    def _add(self, name: str, drafted: Tensor, accepted: Tensor) -> None:
        self.counts[self.place[name]] += torch.stack([drafted, accepted])


def _edges(parents: Tensor, tokens: Tensor) -> Tensor:
    """Parent node and token as one number, int64."""
    return (parents.long() << 32) + tokens
