"""The policy that the decode loop asks: for a plan of every step, and to learn from what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from gsd_kernels import GraphConfig

from ..records import Verified
from .row_selector import RowSelector


class Plan(NamedTuple):
    """The next step as a policy wants it.

    Attributes:
        shape: of its graph; ``None`` is plain decoding.
        rows: chooses the rows that are forwarded, where the host may decide; ``None``: all.
    """

    shape: GraphConfig | None
    rows: RowSelector | None = None


@dataclass(frozen=True)
class Observation:
    """The outcome of a step.

    Attributes:
        verified: its record, valid until the next step. ``None`` where that is queued already, in replays and tests:
            only the figures below are known.
        tokens: emitted by every sequence; 0 for one that was finished before.
        rows: that the target computed, of each sequence.
        target_seconds, other_seconds: of its forward, and of all else in the step; 0 where unknown.
        late: whether another shape was chosen since it was planned.
    """

    verified: Verified | None
    tokens: Sequence[int]
    rows: int
    target_seconds: float = 0.0
    other_seconds: float = 0.0
    late: bool = False


class Policy(Protocol):
    """Plans every step of one generation: its shape, and which of its rows are forwarded."""

    def plan(self) -> Plan:
        """The next step."""

    def observe(self, seen: Observation) -> None:
        """Learn from a step; called once after each, before the next plan or before the one behind that."""

    def without_model(self, *, reuses: bool) -> Policy:
        """End, and what goes on where no source forwards a model any more; within the largest shapes.

        ``reuses``: whether a source proposes without a forward.
        """

    def end(self) -> None:
        """After the last step."""

    def largest_shapes(self) -> list[GraphConfig]:
        """The shapes that caches and buffers are sized for."""
