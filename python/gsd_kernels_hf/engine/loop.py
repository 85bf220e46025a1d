"""The loop of one generation."""

from __future__ import annotations

from typing import Protocol

from gsd_kernels import GraphConfig

from ..records import Verified
from .capture import stepping
from .output import Output
from .session import Session
from .stats import GenerationStats


class Policy(Protocol):
    """Chooses the shape of every step."""

    def begin(self, session: Session) -> None:
        """Before the first step of a generation."""
        ...

    def shape(self) -> GraphConfig | None:
        """The shape of the next step; ``None`` for plain decoding."""
        ...

    def observe(self, verified: Verified, tokens: list[int]) -> None:
        """After a step, with the tokens that every sequence gained."""
        ...


class Ranks(Protocol):
    """Keeps the ranks of a sharded model together."""

    def check(self, verified: Verified, finished: bool, *, timed: bool) -> bool:
        """After a step, whether to stop; see :class:`~gsd_kernels_hf.parallel.Agreement`."""
        ...


def decode(session: Session, policy: Policy, ranks: Ranks, out: Output) -> GenerationStats:
    """Decode until every sequence is done: shape → step → emit → check → observe."""
    policy.begin(session)
    step = stepping(session)
    while not out.finished:
        session.use(policy.shape())
        verified = step()
        tokens = out.emit(verified)
        out.finished = ranks.check(verified, out.finished, timed=out.timed)
        policy.observe(verified, tokens)
    return out.stats
