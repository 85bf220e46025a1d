"""The loop of one generation."""

from __future__ import annotations

from typing import Protocol

from ..policy.base import Plan, Policy
from ..records import Verified
from .capture import Capturers, stepping
from .crossing import cross
from .output import Output
from .session import Session
from .stats import GenerationStats
from .warming import warm

PLAIN_PLAN = Plan(None)


class Ranks(Capturers, Protocol):
    """Keeps the ranks of a sharded model together."""

    def check(self, verified: Verified, finished: bool, *, timed: bool) -> bool:
        """Compare a step with other ranks'; whether to stop. See :class:`~gsd_kernels_hf.parallel.Agreement`."""
        ...


def decode(session: Session, policy: Policy, ranks: Ranks, out: Output) -> GenerationStats:
    """Decode until every sequence is done: plan → step → emit → check → observe.

    Args:
        session: begun on the texts.
        policy: chooses the shape of every step.
        ranks: of a sharded target, or one process.
        out: gets the tokens; says when all is done.

    Returns:
        Statistics, complete once ``out.result()`` was asked for.
    """
    step = stepping(session, ranks)
    while not out.finished:
        session.reserve(out.longest)
        policy = without_left(session, policy, out)
        between = cross(session, out.lengths, out.done)
        session.use(PLAIN_PLAN if between else policy.plan())
        warm(session, policy.largest_shapes())
        verified = step()
        heard = session.hear()
        out.emit(verified, heard)
        out.finished = ranks.check(verified, out.finished, timed=out.timed)
        if not between:
            policy.observe(session.observed(verified, heard))
    policy.end()
    return out.stats


def without_left(session: Session, policy: Policy, out: Output) -> Policy:
    """What chooses the next shape, once sources are left out that the text has outgrown."""
    left = session.leave(out.reach)
    if not left or session.mixer is None:
        return policy
    out.stats.left_out += left
    if any(source.forwards for source in session.mixer.sources):
        return policy
    return policy.without_model(reuses=bool(session.mixer.lookups))
