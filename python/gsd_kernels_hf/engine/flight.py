"""Steps that are queued: on a GPU the host hears of one while the device takes the next, where that changes nothing.

The device then never waits for the host. One step is queued in vain where a text ends before the host knows: it emits
nothing. What the host plans, it plans without the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from gsd_kernels import GraphConfig

from ..model import replay
from ..policy.base import Observation
from ..records import DecodeState, Verified, report_sizes
from .session import Session
from .stats import Part


class HostReport(NamedTuple):
    """A step in the host's memory.

    Attributes:
        done: of every sequence.
        tokens: that each emitted.
        counted: nodes, merges and accepted merges so far, of a step that another one followed unheard.
    """

    done: Sequence[bool]
    tokens: Sequence[list[int]]
    counted: list[int] | None

    @classmethod
    def of(cls, state: DecodeState, whole: Tensor, counted: list[int] | None) -> HostReport:
        """A step out of ``whole``, int32 [n]: the state's report as it is in the host's memory."""
        batch, width = state.emitted.shape
        numbers = iter(whole.tolist())  # one call, where a tensor for each part would be ten
        flags, counts, emitted = (list(islice(numbers, part)) for part in report_sizes(batch, width))
        done = [bool(flags[i // 4] >> i % 4 * 8 & 255) for i in range(batch)]
        return cls(done, [emitted[i * width : i * width + count] for i, count in enumerate(counts)], counted)


@dataclass
class Launched:
    """A step that the device takes or has taken, and the host has not heard of.

    Attributes:
        session: that takes it.
        verified: its record.
        shape: of its graph; ``None``: nothing is drafted.
        drafted_rows: that drafts forward in it, padding included.
        begin: when it was queued, by the clock.
        typical: whether its times say something of later ones.
        sent: its report and the session's counts on the way to the host, there once the event is over; ``None``: it is
            heard of before another is queued.
        parts: what was timed of it, where it is sent.
        seconds: that it took, once the host has heard of it.
    """

    session: Session
    verified: Verified
    shape: GraphConfig | None
    drafted_rows: int
    begin: float
    typical: bool
    sent: tuple[Tensor, Tensor, torch.cuda.Event] | None = None
    parts: list[Part] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def of(cls, session: Session, step: Callable[[], Verified], *, behind: Launched | None, may_fly: bool) -> Launched:
        """Queue a step.

        Args:
            session: planned.
            step: takes it.
            behind: the step before, if the host has not heard of it.
            may_fly: whether the host may queue another before it hears of this one, if it is replayed.
        """
        captured, verified = session.captured, step()
        begin, typical = session.clock.step_start, captured is None or captured.typical
        launched = cls(session, verified, session.config, session.drafted_rows, begin, typical)
        if behind is not None and (captured is None or captured.added):
            behind.typical = False  # the host hears of it later than it could
        if may_fly and captured is not None and captured.replayed:
            # Behind the step, before the next one writes the same storage.
            report, counts = (replay.send(tensor) for tensor in (session.state.report, session.counts))
            launched.sent, launched.parts = (report, counts, torch.cuda.Event()), session.clock.hand_over()
            launched.sent[2].record(torch.cuda.current_stream(session.counts.device))
        return launched

    def hear(self) -> HostReport:
        """Hear what it tells the host: one read, which waits for it, and not for a step behind it."""
        clock, rule, state = self.session.clock, self.session.rule, self.session.state
        if self.sent is None:
            heard = HostReport.of(state, state.report.cpu(), None)
        else:
            report, counts, event = self.sent
            event.synchronize()
            heard = HostReport.of(state, report, counts.tolist())
        clock.over(self.parts, self.begin)
        self.seconds = clock.since_step()
        # What a rule on the host has marked behind the step, it knows.
        done = [a or b for a, b in zip(heard.done, rule.done or heard.done, strict=True)]
        return heard._replace(done=done)

    def observed(self, heard: HostReport) -> Observation:
        """Give what a policy learns of it, which has planned the next step since.

        Seconds are 0 where they are not known, or say nothing about later steps, which will be captured.
        """
        clock = self.session.clock
        if self.sent is None:  # else what comes behind the step is part of the next one
            clock.read()
            self.seconds = clock.since_step()
        target = clock.last("target") if self.typical else 0.0
        other = self.seconds - target if target > 0 else 0.0
        rows = self.verified.rows.token_ids.shape[1]
        late = self.shape != self.session.config
        record = self.verified if self.sent is None else None  # over which the step behind it may be writing
        return Observation(record, [len(tokens) for tokens in heard.tokens], rows, target, other, late)

    def wait(self) -> None:
        """Wait for it, if it was queued in vain."""
        if self.sent is not None:
            self.sent[2].synchronize()
