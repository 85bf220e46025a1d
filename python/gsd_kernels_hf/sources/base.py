"""What a draft source is: one class that proposes candidates, one file each.

A step's drafting goes level by level. At each level every source is asked what may follow each frontier node;
:class:`~gsd_kernels_hf.sources.drafter.Drafter` mixes the answers by weights that it learns. Of a source only
:meth:`DraftSource.propose` has to be written, see docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from gsd_kernels import Frontier, GraphConfig, TokenGraph

from ..model.runner import RowModel
from ..records import Candidates, DecodeState, Sampler, Verified


class Text(Protocol):
    """What a source may use of the session that writes batches of texts, one after the other.

    Attributes:
        state: where every sequence stands, on the target's device; its tensors stay, their content changes.
        sampler: what keys the noise of a draw.
        target: the model that verifies.
        branch: the most candidates that any shape has after one node.
        continues: whether this text goes on from the last one.
        draws: takes a forward's candidates from its logits in place of the best ones, or ``None``:
            (level, logits [B, W, V], positions int32 [B, W]) → candidates.
        reference_ids: int64 [length] or [batch, length], what the text may repeat, or ``None``.
    """

    state: DecodeState
    sampler: Sampler
    target: RowModel
    branch: int
    continues: bool
    draws: Callable[[int, Tensor, Tensor], Candidates] | None

    @property
    def reference_ids(self) -> Tensor | None: ...

    def rows_of(self, model: PreTrainedModel) -> RowModel:
        """``model`` with a cache of its own."""
        ...

    def read_prompt(self, rows: RowModel) -> None:
        """Store all of the prompt but its last token in the cache of ``rows``, as far as it is not there."""
        ...


@dataclass(frozen=True)
class Level:
    """One level of a step's drafting: the W frontier nodes that are expanded, in the graph so far.

    Attributes:
        number: of the level; the root alone is level 0.
        config: the shape of the step.
        graph: all nodes so far, with the tokens before each.
        frontier: ids, tokens, depths and draft-cache slots of the nodes, padded.
        positions: int32 [B, W], index in the text of the token after each node, which keys its noise.
    """

    number: int
    config: GraphConfig
    graph: TokenGraph
    frontier: Frontier
    positions: Tensor


@dataclass(frozen=True)
class Proposal:
    """What a source proposes after every frontier node.

    Attributes:
        tokens: int32 [B, W, K], best first; −1 for none.
        log_probs: float32 [B, W, K]; −inf for none.
        index: int [B, W], which of the source's weights holds for each node (matched context, place of a head);
            ``None``: it has one.
    """

    tokens: Tensor
    log_probs: Tensor
    index: Tensor | None = None

    @property
    def candidates(self) -> Candidates:
        return self.tokens, self.log_probs


class DraftSource:
    """A draft source. Every session works on a copy of its own (:func:`copy.copy`), from :meth:`begin` on.

    What is proposed changes the speed, never the output. Nothing in :meth:`propose` and :meth:`observe` may wait for
    the device, and both must do the same work at every step of a shape, so that a step can be captured.

    Attributes:
        name: in ``draft_sources`` and in statistics.
        costs_forward: whether proposing takes a forward of a model.
        needs_hidden: whether :class:`~gsd_kernels_hf.records.Verified` must hold hidden states.
        shares: share of the source beside those asked before it, by ``Proposal.index``, until something is learned.
        worth: how often its candidates are right, over what they claim, by ``Proposal.index``, where it is alone;
            ``None``: its probabilities are taken as they are.
        models: models that it forwards, besides the target; they take part in the checks of a call.
    """

    name = "custom"
    costs_forward = False
    needs_hidden = False
    shares: tuple[float, ...] = (0.2,)
    worth: tuple[float, ...] | None = None
    models: tuple[PreTrainedModel, ...] = ()

    def check(self, target: PreTrainedModel) -> None:
        """Raise ValueError, with the cure, unless the source can draft for ``target``."""

    def begin(self, text: Text) -> None:
        """Make what texts of this session need."""

    def restart(self) -> None:
        """Start a batch of texts, whose prompt is in the state: forget the last one, in place."""

    def end(self) -> None:
        """After the last step of a text."""

    def prepare(self, config: GraphConfig) -> None:
        """Get ready for steps of another shape; outside the step, so this may wait for the device."""

    def propose(self, level: Level) -> Proposal | None:
        """Candidates after every frontier node, or ``None`` for nothing at this level."""
        raise NotImplementedError

    def observe(self, verified: Verified) -> None:
        """Learn from a verified step."""

    def num_rows(self, config: GraphConfig) -> int:
        """Rows that a step of this shape forwards, padding included."""
        return 0
