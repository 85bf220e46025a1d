"""One decoding step as one CUDA graph: all draft levels, merging, the target's forward, verification and commit."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gsd_kernels import GraphConfig

from ..model import replay
from ..records import Verified
from .session import Session

logger = logging.getLogger("gsd_kernels")

WARM_STEPS = 2
"""Steps of a shape before it is captured: kernels are compiled and its storage is made in them."""


def stepping(session: Session) -> Callable[[], Verified]:
    """The function that takes a step: replayed from CUDA graphs where that is possible, else ``session.step``."""
    if not can_capture(session):
        return session.step
    if session.captured is None:
        session.captured = CapturedStep(session)
    return session.captured


def can_capture(session: Session) -> bool:
    """Whether all models lie on one GPU of their own, and nothing in a step waits for the host."""
    if not (session.kind.alone and session.rule.on_device):
        return False
    models = [rows.model for rows in session.row_models]
    devices = {parameter.device for model in models for parameter in model.parameters()}
    return len(devices) == 1 and replay.is_gpu(next(iter(devices)))


class CapturedStep:
    """``session.step``, replayed from a CUDA graph.

    Every shape (:class:`~gsd_kernels.GraphConfig`, or ``None`` for plain decoding) has its own graph. Its first
    :data:`WARM_STEPS` steps are ordinary ones; then it is captured, which computes nothing, and replayed from there on.
    All state of a session is updated in place and nothing in a step waits for the device, so a replay is a step. Its
    record is the same tensors every time.

    Where capturing fails, steps go on as ordinary ones, with one line in the log.
    """

    def __init__(self, session: Session) -> None:
        self.session: Session = weakref.proxy(session)  # which holds this
        self.warm: Counter[GraphConfig | None] = Counter()
        self.graphs: dict[GraphConfig | None, tuple[Callable[[], Any], Verified]] = {}
        self.pool: Any = None  # one memory pool: only one graph runs at a time, and state lies outside
        self.failed = False

    def __call__(self) -> Verified:
        """Take a step; its record."""
        shape = self.session.config
        if shape not in self.graphs and (self.failed or self.warm[shape] < WARM_STEPS or not self._add(shape)):
            self.warm[shape] += 1
            return self.session.step()
        replay, record = self.graphs[shape]
        replay()
        return record

    def _add(self, shape: GraphConfig | None) -> bool:
        """Capture the session's current shape; ``False`` where that is impossible."""
        try:
            with untimed(self.session):
                self.graphs[shape] = self.capture()
        except RuntimeError as error:
            self.failed = True
            logger.warning("a step could not be captured, so steps run uncaptured: %s", " ".join(str(error).split()))
        return not self.failed

    def capture(self) -> tuple[Callable[[], Any], Verified]:
        """Record one step without running it.

        Returns:
            A function that replays it, and the step's record, whose tensors every replay writes.

        Raises:
            RuntimeError: something in the step cannot be captured.
        """
        graph, record = replay.lane_of(self.session.state.tokens.device).capture(self.session.step, self.pool)
        self.pool = graph.pool
        return graph, record


class _NoClock:
    """Stands in while a step is captured: events of a captured stream cannot be read."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        yield


@contextmanager
def untimed(session: Session) -> Iterator[None]:
    """Keep the session's clock out of what is run here."""
    clock = session.clock
    session.clock = _NoClock()  # type: ignore[assignment]
    try:
        yield
    finally:
        session.clock = clock
