"""The key by which a call finds sessions that may serve it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..policy.base import Policy
from ..sources.base import DraftSource
from .request import Request


@dataclass(frozen=True)
class SessionKey:
    """Key of sessions that may serve a call: what storage and captured steps depend on, besides the models."""

    batch: int
    branch: int  # the most candidates after one node
    width: int  # the most tokens that one step emits
    slots: int  # cache positions beyond the committed prefix
    sources: tuple[str, ...]
    warpers: tuple[tuple[str, float], ...]
    eos_ids: tuple[int, ...]
    draws: bool  # whether the draft's own samples are verified
    padding: bool  # whether the target reads on in sequences that ended
    backend: str
    alone: bool  # whether no other rank must do the same at the same time
    axes: tuple[int, ...] | None  # of positions, behind prompts of more than text; None: of text

    @classmethod
    def of(cls, request: Request, policy: Policy, sources: Sequence[DraftSource], *, alone: bool) -> SessionKey:
        """The key of the sessions that may serve a call.

        Args:
            request: the call.
            policy: what chooses the shapes of its steps; its largest shapes size the storage.
            sources: in the order in which they are mixed.
            alone: whether no other rank must do the same at the same time.
        """
        shapes = policy.largest_shapes()
        return cls(
            batch=request.batch,
            branch=max((shape.branch for shape in shapes), default=1),
            width=max((shape.chain_rows for shape in shapes), default=1),
            slots=max((shape.cache_slots for shape in shapes), default=1),
            sources=tuple(source.name for source in sources),
            warpers=tuple(request.plan.warper_arguments.items()),
            eos_ids=tuple(sorted(request.eos_ids)),
            draws=request.draws_from_draft,
            padding=request.reads_padding,
            backend=request.options.backend,
            alone=alone,
            axes=None if request.inputs is None else request.inputs.axes,
        )
