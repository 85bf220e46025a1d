"""A count of what each source brought to a text: drafted tokens that were verified, the accepted ones, and seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gsd_kernels.ops.learn import Asked

from ..records import Verified


@dataclass
class Brought:
    """The figures of one source: rows that were verified, without the roots, those of them accepted, and seconds."""

    proposed: int = 0
    accepted: int = 0
    seconds: float = 0.0


class Tally:
    """Counts by source, on the host, of steps in the host's memory; on a GPU they would cost launches in every step.

    A drafted token counts for the first source, in the order in which they are mixed, that proposed it after its
    parent. So what a later source brings is what it adds to those before it, and the sums are those of all rows.

    Args:
        names: of the sources, in that order.
        counts: whether steps are in the host's memory.

    Attributes:
        sources: by name; ``None``: not counted.
    """

    def __init__(self, names: Sequence[str], *, counts: bool) -> None:
        self.sources = {name: Brought() if counts else None for name in names}
        self.counts = counts

    def restart(self) -> None:
        """Begin a text."""
        self.sources = {name: Brought() if self.counts else None for name in self.sources}

    def begin(self) -> float:
        """When a source's work begins."""
        return time.perf_counter() if self.counts else 0.0

    def end(self, name: str, begin: float) -> None:
        """Its end."""
        if (brought := self.sources[name]) is not None:
            brought.seconds += time.perf_counter() - begin

    def count(self, asked: Mapping[str, Sequence[Asked]], verified: Verified) -> None:
        """Count a step that drafted.

        Args:
            asked: what the sources proposed, by name, in the order in which they are mixed.
            verified: the step; after it, since the step itself waits for nothing.
        """
        proposing = [name for name, levels in asked.items() if levels]
        if not self.counts or not proposing or verified.graph is None:
            return
        *others, last = proposing
        paths = verified.accepted.accepted_rows.tolist() if others else []
        lengths = zip(verified.rows.num_rows.tolist(), verified.accepted.num_accepted.tolist(), strict=True)
        for sequence, (rows, accepted) in enumerate(lengths):
            if not accepted:
                continue  # a finished sequence verifies nothing
            if not others:
                self._add(last, rows - 1, accepted - 1)
                continue
            left, path = set(range(1, rows)), set(paths[sequence][1:accepted])
            tokens, parents = _edges(verified, sequence)
            for name in others:
                proposed: dict[int, list[int]] = {}  # by node
                for level in asked[name]:
                    proposed.update(
                        zip(level.node_ids[sequence].tolist(), level.tokens[sequence].tolist(), strict=True)
                    )
                mine = {row for row in left if tokens[row] in proposed.get(parents[row], ())}
                self._add(name, len(mine), len(mine & path))
                left -= mine
            self._add(last, len(left), len(left & path))

    def _add(self, name: str, proposed: int, accepted: int) -> None:
        if (brought := self.sources[name]) is not None:
            brought.proposed += proposed
            brought.accepted += accepted


def _edges(verified: Verified, sequence: int) -> tuple[list[int], list[int]]:
    """Token and parent node of every row of a sequence; the root's say nothing."""
    rows = verified.rows
    nodes = rows.node_ids[sequence].tolist()
    return rows.token_ids[sequence].tolist(), [nodes[parent] for parent in rows.parent_rows[sequence].tolist()]
