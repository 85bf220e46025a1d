"""The loop of one generation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..model import replay
from ..parallel import Ranks
from ..policy.learning import Plan, Policy
from ..sources.base import reaches
from .capture import Launched, stepping
from .output import Output
from .session import Session, warm


def decode(session: Session, policy: Policy, ranks: Ranks, out: Output) -> None:
    """Decode until every sequence is done: plan → step → emit → check → observe.

    On a GPU the next step may be planned and queued before a step is emitted, see :mod:`.capture`.

    Args:
        session: begun on the texts.
        policy: chooses the shape of every step.
        ranks: of a sharded target, or one process.
        out: gets the tokens; says when all is done.
    """
    step, flies, between = stepping(session, ranks), may_fly(session, out, alone=ranks.alone), False
    queued: Launched | None = None  # that the host has not heard of

    def hear(launched: Launched) -> None:
        """Emit, check and observe a step."""
        launched.hear()
        out.emit(launched)
        out.finished = ranks.check(launched.verified, out.finished, timed=out.timed)
        if not between:  # no shape of the policy's
            policy.observe(launched.observed())

    try:
        while not out.finished:
            if queued is not None and not may_follow(session, out):
                hear(queued)
                queued = None
                continue
            session.reserve(out.longest + session.key.slots, session.most)
            if left := session.mixer.leave(out.reach):
                session.recapture()
                out.stats.left_out += left
                if not any(source.forwards for source in session.mixer.sources):
                    policy = policy.without_model(reuses=bool(session.mixer.lookups))
            between = cross(session, out.lengths, out.done)
            session.use(Plan(None) if between else policy.plan())
            warm(session, policy.largest_shapes())
            before, queued = queued, Launched(session, step, behind=queued, may_fly=flies)
            if before is not None:
                hear(before)
            if queued.sent is None and not out.finished:
                hear(queued)
                queued = None
    finally:
        if queued is not None and queued.sent is not None:  # in vain
            queued.sent[2].synchronize()
    policy.end()


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
    width = session.key.width
    reach, positions = out.reach + width, session.target.positions
    there = positions is None or reach + width <= positions
    fits = out.longest + width + session.key.slots <= session.capacity
    return there and fits and all(reaches(source, reach) for source in session.mixer.sources) and not out.ends


def cross(session: Session, lengths: Sequence[int], done: Sequence[bool]) -> bool:
    """Read texts anew that crossed the border between two sets of rotary frequencies since the last step.

    So does transformers, see :mod:`~gsd_kernels_hf.model.sides`.

    Args:
        session: begun on the texts.
        lengths: of the sequences, padding included.
        done: which of them ended.

    Returns:
        Whether the next step must be plain: its rows would lie on both sides.
    """
    sides = session.target.sides
    if sides is None or not sides.pending:
        return False
    longest, mask = max(lengths), session.request.attention_mask
    lengths = [longest] * len(lengths) if session.key.padding else lengths
    crossed = [length > sides.original for length in lengths]
    if any(long and column for long, column in zip(crossed, sides.columns, strict=True)):
        if mask is not None:
            mask = nn.functional.pad(mask, (0, longest - 1 - mask.shape[1]), value=1)
        with session.reading():
            session.target.cross(crossed, session.state.tokens[:, : longest - 1], mask)
    before = [n for n, long, end in zip(lengths, crossed, done, strict=True) if not long and not end]
    sides.pending = bool(before)
    return any(length + session.key.width > sides.original for length in before)
