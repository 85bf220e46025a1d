"""The loop of one generation."""

from __future__ import annotations

from typing import Protocol

from ..model import replay
from ..policy.base import Plan, Policy
from ..records import Verified
from ..sources.base import reaches
from .capture import Capturers, stepping
from .crossing import cross
from .flight import Launched
from .output import Output
from .session import Session
from .stats import GenerationStats
from .warming import warm

PLAIN_PLAN = Plan(None)


class Ranks(Capturers, Protocol):
    """Keeps the ranks of a sharded model together.

    Attributes:
        alone: whether there is one process.
    """

    alone: bool

    def check(self, verified: Verified, finished: bool, *, timed: bool) -> bool:
        """Compare a step with other ranks'; whether to stop. See :class:`~gsd_kernels_hf.parallel.Agreement`."""
        ...


def decode(session: Session, policy: Policy, ranks: Ranks, out: Output) -> GenerationStats:
    """Decode until every sequence is done: plan → step → emit → check → observe.

    On a GPU the next step may be planned and queued before a step is emitted, see :mod:`.flight`.

    Args:
        session: begun on the texts.
        policy: chooses the shape of every step.
        ranks: of a sharded target, or one process.
        out: gets the tokens; says when all is done.

    Returns:
        Statistics, complete once ``out.result()`` was asked for.
    """
    step, flies = stepping(session, ranks), may_fly(session, out, alone=ranks.alone)
    queued: Launched | None = None  # that the host has not heard of
    try:
        while not out.finished:
            if queued is not None and not may_follow(session, out):
                _hear(queued, policy, ranks, out)
                queued = None
                continue
            session.reserve(out.longest)
            policy = without_left(session, policy, out)
            between = cross(session, out.lengths, out.done)
            session.use(PLAIN_PLAN if between else policy.plan())
            warm(session, policy.largest_shapes())
            before, queued = queued, Launched.of(session, step, behind=queued, may_fly=flies)
            if before is not None:
                _hear(before, policy, ranks, out)
            if queued.sent is None and not out.finished:
                _hear(queued, policy, ranks, out, learns=not between)
                queued = None
    finally:
        if queued is not None:
            queued.wait()
    policy.end()
    return out.stats


def _hear(launched: Launched, policy: Policy, ranks: Ranks, out: Output, *, learns: bool = True) -> None:
    """Emit, check and observe a step."""
    heard = launched.hear()
    out.emit(launched, heard)
    out.finished = ranks.check(launched.verified, out.finished, timed=out.timed)
    if learns:
        policy.observe(launched.observed(heard))


def without_left(session: Session, policy: Policy, out: Output) -> Policy:
    """Return the policy of the next shape, once sources are left out that the text has outgrown."""
    left = session.leave(out.reach)
    if not left or session.mixer is None:
        return policy
    out.stats.left_out += left
    if any(source.forwards for source in session.mixer.sources):
        return policy
    return policy.without_model(reuses=bool(session.mixer.lookups))


def may_fly(session: Session, out: Output, *, alone: bool) -> bool:
    """Say whether steps of this call may be queued before the host hears of the last one.

    Not where the host decides something between two steps: token by token, by a clock, an observer or other ranks, or
    where sequences that ended are read on.
    """
    decides = not session.rule.on_device or session.target.sides is not None or session.key.padding
    return replay.is_gpu(session.kv_len.device) and alone and not decides and out.observer is None and not out.timed


def may_follow(session: Session, out: Output) -> bool:
    """Say whether a step may be queued behind one that the host has not heard of, however many tokens that emits.

    There must be room and positions for both, and a sequence that may go on behind the first.
    """
    width, sources = session.key.width, session.mixer.sources if session.mixer is not None else ()
    reach, positions = out.reach + width, session.target.positions
    there = positions is None or reach + width <= positions
    fits = out.longest + width + session.key.slots <= session.capacity
    return there and fits and all(reaches(source, reach) for source in sources) and not out.ends
