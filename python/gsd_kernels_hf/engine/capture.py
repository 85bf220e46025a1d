"""Decoding steps on a GPU: as CUDA graphs, and queued, so that the host hears of one while the device takes the next.

All draft levels, merging, the target's forward, verification and commit are captured. Where it changes nothing, a step
is queued behind one that the host has not heard of, so the device never waits for it. One step is queued in vain where
a text ends before the host knows: it emits nothing. What the host plans, it plans without the last step.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from gsd_kernels import GraphConfig
from gsd_kernels.backends import compiles

from ..acceptance.rule import accepted
from ..model import replay
from ..model.fused import FusedRows
from ..parallel import Ranks
from ..policy.learning import Observation
from ..records import Verified, report_sizes
from ..sources.base import OwnSource
from .session import Session
from .stats import Part

logger = logging.getLogger("gsd_kernels")

WARM_STEPS = 2
"""Steps of a shape before it is captured, where kernels may be compiled or storage made in them."""

Kind = tuple[GraphConfig | None, bool]
"""What is captured once: the shape of its steps, and whether the device accepts."""


class Launched:
    """A step that the device takes or has taken; the host hears of it later.

    Args:
        session: planned; takes it.
        step: takes it.
        behind: the step before, if the host has not heard of it.
        may_fly: whether the host may queue another before it hears of this one, if it is replayed.

    Attributes:
        verified: its record.
        shape: of its graph; ``None``: nothing is drafted.
        drafted_rows: that drafts forward in it, padding included.
        begin: when it was queued, by the clock.
        typical: whether it took as long as later ones of its shape will: replayed, or since no step will be.
        sent: its report and the session's counts on the way to the host, there once the event is over; ``None``: it is
            heard of before another is queued.
        parts: what was timed of it, where it is sent.
        seconds: that it took, once the host has heard of it.
        done: of every sequence, likewise.
        tokens: that each emitted, likewise.
        counted: nodes, merges and accepted merges so far, of a step that another one followed unheard.
    """

    counted: list[int] | None = None
    sent: tuple[Tensor, Tensor, torch.cuda.Event] | None = None
    parts: Sequence[Part] = ()

    def __init__(
        self, session: Session, step: Callable[[], Verified], *, behind: Launched | None, may_fly: bool
    ) -> None:
        captured, self.session, self.verified = session.captured, session, step()
        self.shape, self.drafted_rows, self.begin = session.config, session.drafted_rows, session.clock.step_start
        self.typical = captured is None or captured.replayed or captured.failed
        if behind is not None and (captured is None or captured.added):
            behind.typical = False  # the host hears of it later than it could
        if may_fly and captured is not None and captured.replayed:
            # Behind the step, before the next one writes the same storage.
            report, counts = (replay.send(tensor) for tensor in (session.state.report, session.counts))
            self.sent = report, counts, torch.cuda.Event()
            self.parts, session.clock.pending = session.clock.pending, []  # counted when the step is over
            self.sent[2].record(torch.cuda.current_stream(session.counts.device))

    def hear(self) -> None:
        """Hear what it tells the host: one read, which waits for it, and not for a step behind it."""
        clock, state = self.session.clock, self.session.state
        if self.sent is None:
            report = state.report.cpu()
        else:
            report, counts, event = self.sent
            event.synchronize()
            self.counted = counts.tolist()
        batch, width = state.emitted.shape
        numbers = iter(report.tolist())  # one call, where a tensor for each part would be ten
        flags, lengths, emitted = (list(islice(numbers, part)) for part in report_sizes(batch, width))
        self.tokens = [emitted[i * width : i * width + length] for i, length in enumerate(lengths)]
        clock.over(self.parts, self.begin)
        self.seconds = clock.since_step()
        # What a rule on the host has marked behind the step, it knows.
        marked = self.session.rule.done or [False] * batch
        self.done = [over or bool(flags[i // 4] >> i % 4 * 8 & 255) for i, over in enumerate(marked)]

    def observed(self) -> Observation:
        """Give what a policy learns of it, which has planned the next step since.

        Seconds are 0 where they are not known, or say nothing about later steps, which will be captured.
        """
        clock = self.session.clock
        if self.sent is None:  # else what comes behind the step is part of the next one
            clock.read()
            self.seconds = clock.since_step()
        target = clock.latest.get("target", 0.0) if self.typical else 0.0
        other = self.seconds - target if target > 0 else 0.0
        rows = self.verified.rows.token_ids.shape[1]
        late = self.shape != self.session.config
        record = self.verified if self.sent is None else None  # over which the step behind it may be writing
        return Observation(record, [len(tokens) for tokens in self.tokens], rows, target, other, late)


def stepping(session: Session, ranks: Ranks) -> Callable[[], Verified]:
    """The function that takes a step: replayed from CUDA graphs where that is possible, else ``session.step``."""
    if not (ranks.captures and ranks.agree(can_capture(session))):
        return session.step
    if session.captured is None:
        session.captured = CapturedStep(session, ranks)
    return session.captured


def can_capture(session: Session) -> bool:
    """Return whether all that this process forwards lies on one GPU, and nothing in a step waits for it."""
    sources = session.mixer.sources
    waits = any(rows.recurrent for rows in session.row_models) or any(source.on_host for source in sources)
    if waits or not replay.is_gpu(session.kv_len.device):
        return False
    models = [rows.model for rows in session.row_models]
    for source in sources:
        models += [module for module in source.forwards if isinstance(module, nn.Module)]
    devices = {parameter.device for model in models for parameter in model.parameters()}
    return devices == {session.kv_len.device}


def warm_steps(session: Session) -> int:
    """Ordinary steps before a shape is captured: none where all that it launches was compiled ahead.

    So where all models are one operator, which kernels of Triton or cuBLAS' own start are no part of, and their storage
    is there; and where Triton serves no op, or its kernels for the shape were compiled before the first step.
    """
    if compiles(session.backend, session.kv_len.device) and session.config not in session.compiled:
        return WARM_STEPS
    known = all(isinstance(source, OwnSource) and source.compiled_ahead for source in session.mixer.sources)
    ahead = all(isinstance(rows, FusedRows) and rows.cache.layers[0].is_initialized for rows in session.row_models)
    return 0 if known and ahead else WARM_STEPS


class CapturedStep:
    """``session.step``, replayed from CUDA graphs.

    Every shape (:class:`~gsd_kernels.GraphConfig`, or ``None`` for plain decoding) has its own. Its first
    :func:`warm_steps` are ordinary ones; then it is captured, which computes nothing, and replayed from there on.
    All state of a session is updated in place and nothing on the device waits for the host, so a replay is a step. Its
    record is the same tensors every time.

    Each part of a step that is timed is a graph, so that events lie between graphs and are new in every step. With the
    copies that the host reads, which are queued behind a step, nothing of a step that the host has not heard of is
    written by the next one but its record, which nobody is given then. Where the host accepts, it does so between two
    graphs, and writes what it accepts where the next one reads it.

    Where capturing fails, on any rank, steps go on as ordinary ones, with one line in the log; without ordinary steps
    before it, it is tried again behind them.
    """

    def __init__(self, session: Session, ranks: Ranks) -> None:
        self.session: Session = weakref.proxy(session)  # which holds this
        self.ranks = ranks
        self.warm: Counter[Kind] = Counter()
        self.steps: dict[Kind, Callable[[], Verified]] = {}
        # One memory pool: only one graph runs at a time, and state lies outside. What a graph returned lies inside: the
        # next step, of any shape, may write over it.
        self.pool: Any = None
        self.refused: set[Kind] = set()  # what could not be captured without ordinary steps
        self.failed = False
        self.replayed = False  # whether the last step was replayed
        self.added = False  # whether it was captured before that

    def __call__(self) -> Verified:
        """Take a step; its record."""
        kind = self.session.config, self.session.rule.on_device
        least = WARM_STEPS if kind in self.refused else warm_steps(self.session)
        self.added = kind not in self.steps
        if self.added and (self.failed or self.warm[kind] < least or not self._add(kind)):
            self.warm[kind] += 1
            self.replayed = False
            return self.session.step()
        self.replayed = True
        return self.steps[kind]()

    def forget(self) -> None:
        """Capture anew, since storage lies elsewhere or others draft."""
        self.warm.clear()
        self.refused.clear()
        self.steps.clear()
        self.pool = None

    def _add(self, kind: Kind) -> bool:
        """Capture the session's current shape; ``False`` where that is impossible.

        Raises:
            DeviceLostError: the GPU failed for good, so steps would fail as well.
        """
        why = "on another rank"
        try:
            self.steps[kind] = self.whole()
        except replay.CaptureError as error:
            why = str(error)
        if not self.ranks.agree(kind in self.steps):
            self.steps.pop(kind, None)
            if self.warm[kind] >= WARM_STEPS:
                self.failed = True
                logger.warning("a step could not be captured, so steps run uncaptured: %s", why)
            else:
                self.refused.add(kind)
                logger.info("a step could not be captured yet: %s", why)
        self.session.clock.begin_step()  # capturing is no part of it
        return kind in self.steps

    def whole(self) -> Callable[[], Verified]:
        """The graphs of a step, see :meth:`Session.step`: a function that replays them and returns its record.

        Raises:
            CaptureError: something that the device does in the step cannot be captured.
        """
        session = self.session  # no cycle: graphs go with their session, at once
        on_host = not session.rule.on_device
        batch, width = session.key.batch, session.max_path + 1
        heard = accepted([[]] * batch, [0] * batch, width, session.kv_len.device)  # nothing yet
        propose, proposed = self._capture(session.propose)
        put_back = session.keeping()
        attend, unverified = self._capture(lambda: session.attend(*proposed))

        def settled() -> Verified:
            verified = session.settle(unverified, heard if on_host else session.accept(unverified))
            session.mixer.observe(verified)
            return verified

        settle, verified = self._capture(settled)
        # What sources learn may be nothing, and no graph of its own: it is timed with the commit.
        last = "draft" if session.mixer.sources else "other"

        def step() -> Verified:
            with session.clock.part("draft"):
                propose()
            put_back()
            with session.clock.part("target"):
                attend()
            if on_host:
                for static, value in zip(heard.tensors(), session.accept(unverified).tensors(), strict=True):
                    static.copy_(value)
            with session.clock.part(last):
                settle()
            session.rule.settle()
            return verified

        return step

    def _capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record ``function`` without running it: what replays it, and what it returned."""
        lane = replay.lane_of(self.session.state.tokens.device)
        again, self.pool, result = lane.capture(function, self.pool)
        return again, result
