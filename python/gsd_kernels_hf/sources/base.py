"""Draft sources: a class that proposes candidates, one file each.

A step's drafting goes level by level. At each level every source is asked what may follow each frontier node;
:class:`~gsd_kernels_hf.sources.mixer.Mixer` mixes the answers by learned weights. Of a source only
:meth:`DraftSource.propose` has to be written, see docs/contributing.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from gsd_kernels import Frontier, GraphConfig, TokenGraph
from gsd_kernels.ops.learn import Asked

from ..model.runner import CachedText, RowModel
from ..records import Candidates, DecodeState, Sampler, Verified
from .memory import HistoryMemory, Known


class Text(Protocol):
    """The session as its sources see it: it writes batches of texts, one after the other.

    Attributes:
        state: tokens and lengths of every sequence, on the target's device; updated in place.
        sampler: seed, warpers and row numbers, which key the noise of a draw.
        target: the model that verifies.
        kv_len: int32 [B], committed positions of its cache: all but the root, and the padding behind a sequence that
            ended where that is read too.
        branch: the most candidates that any shape has after one node.
        continues: whether this text goes on from the last one.
        first: whether it is the session's first, for which sources make the storage that later ones write in place.
        draws: function that draws a forward's candidates rather than take the best, as speculative sampling needs:
            (level, logits [B, W, V], positions int32 [B, W]) → candidates; else ``None``.
        reference_ids: int64 [length] or [batch, length], a text that the output may repeat; ``None`` for none.
        memory: what earlier calls' histories left, and where this one's goes; ``None`` where nothing is kept.
        learned: what ``gsd_kernels.learn`` left of the target; ``None`` for nothing.
        processors: logits processors of the call, which are to be read only.
        tokenizer: of the target; ``None`` where the call has none.
    """

    state: DecodeState
    sampler: Sampler
    target: RowModel
    kv_len: Tensor
    branch: int
    continues: bool
    first: bool
    draws: Callable[[int, Tensor, Tensor], Candidates] | None
    reference_ids: Tensor | None
    memory: HistoryMemory | None
    learned: Known | None
    processors: Sequence[Any]
    tokenizer: Any

    def rows_of(self, model: PreTrainedModel) -> RowModel:
        """``model`` with a cache of its own."""
        ...

    def read_prompt(self, rows: RowModel) -> None:
        """Store all of the prompt but its last token in the cache of ``rows``, as far as it is not there."""
        ...

    def reading(self) -> AbstractContextManager[None]:
        """Mark what is done inside as the reading of a prompt, and no part of a step."""
        ...

    def keep(self, rows: CachedText) -> None:
        """Let a cache of the source's own grow with the session, count as its memory, and forget when it does."""
        ...

    def recapture(self) -> None:
        """Take nothing of steps that were captured: storage of theirs was replaced."""
        ...


@dataclass(frozen=True)
class Level:
    """One level of a step's drafting: the W frontier nodes that are expanded, in the graph so far.

    Attributes:
        number: of the level; the root alone is level 0.
        config: the shape of the step.
        graph: all nodes so far, with the tokens before each.
        frontier: ids, tokens, depths and draft-cache ancestors of the nodes, [B, W]; ids of padding are −1.
        first_pick: int32 [B], index in the text of the token after the root.
        positions: int32 [B, W], index in the text of the token after each node, which keys its noise.
    """

    number: int
    config: GraphConfig
    graph: TokenGraph
    frontier: Frontier
    first_pick: Tensor

    @cached_property
    def positions(self) -> Tensor:
        """See above; computed when it is asked for."""
        return self.first_pick[:, None] + self.frontier.depths


@dataclass(frozen=True)
class Proposal:
    """The candidates of a source after every frontier node; of a source of one's own they are checked and copied.

    Attributes:
        tokens: int32 (or int64) [B, W, K], best first; −1 for none.
        log_probs: float32 (or another float) [B, W, K], at most 0; −inf for none.
        index: int [B, W], which of the source's interpolation weights holds for each node (length of the matched
            context, number of the head); ``None``: it has one.
        rows: that were forwarded for it, padding included.
    """

    tokens: Tensor
    log_probs: Tensor
    index: Tensor | None = None
    rows: int = 0

    @property
    def candidates(self) -> Candidates:
        """Tokens and log-probabilities."""
        return self.tokens, self.log_probs


@dataclass(frozen=True)
class Prefilled:
    """A piece of the prompt that the target has read.

    Where its cache holds the beginning of the prompt since the last text, pieces begin behind it
    (``text.target.reused``), and what was derived from that beginning has to be kept.

    Attributes:
        hidden: [B, n, D] by layer, of those in ``hidden_layers``, on the device of their layer.
        begin: position of the first of the n tokens, padding included.
    """

    hidden: Mapping[int, Tensor]
    begin: int


class DraftSource:
    """A draft source: it attaches to a text, proposes, observes what became of it, and ends.

    Every session works on a copy of its own (:func:`copy.copy`), from its first :meth:`attach` on. What is proposed
    changes the speed, never the output. Nothing in :meth:`propose` and :meth:`observe` may wait for
    the device, and both must do the same work at every step of a shape, so that a step can be captured.

    Attributes:
        name: in ``draft_sources`` and in statistics.
        forwards: the modules that it runs to propose; ``auto`` weighs what they cost. Models of transformers among them
            are drafts: they take part in the checks of a call. Where a source runs none, ``history_depth`` levels
            follow the ``depth`` ones; all are asked there too, and those that run one return ``None``.
        hidden_layers: numbers of the target's hidden states that are to be observed: i as transformers'
            ``hidden_states[i]``, so 0 are the embeddings; −1 is what the output matrix reads (of a prompt the last
            position alone).
        shares: prior interpolation weight w in (1 − w) · P(sources before it) + w · P(this one), by ``Proposal.index``.
        reliability: ratio of how often its candidates are right to their probability, by ``Proposal.index``, for levels
            where it is alone; ``None``: its probabilities are taken as they are.
        max_length: tokens of a text from which on its model has no positions and it is left out; ``None``: never.
        other_tokens: whether its models read tokens of another tokenizer, which it maps itself; else their vocabulary
            is compared with the target's.
        on_host: whether it works on the host in every step, which may wait for the device then and is not captured.
        reads_prompt: whether it reads all of the prompt, once, before it proposes; ``auto`` may let the first token go
            before.
    """

    name = "custom"
    forwards: Sequence[nn.Module | Any] = ()
    hidden_layers: tuple[int, ...] = ()
    shares: tuple[float, ...] = (0.2,)
    reliability: tuple[float, ...] | None = None
    max_length: int | None = None
    on_host = False
    other_tokens = False
    reads_prompt = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def attach(self, text: Text) -> None:
        """Start a batch of texts, whose prompt is in the state: forget the last one, in place; this may wait.

        ``text`` stays valid as long as the session. With its first one (``text.first``) the storage is made.

        Raises:
            ValueError: it cannot draft for this target: the reason and the cure.
        """

    def propose(self, level: Level) -> Proposal | None:
        """Candidates after every frontier node, [B, W, K] with any K; ``None`` for nothing at this level.

        What ``level`` holds is to be read, not written.
        """
        raise NotImplementedError

    def observe(self, seen: Verified | Prefilled) -> None:
        """Learn from a verified step, or with ``hidden_layers`` from a piece of the prompt, before the first step."""

    def end(self) -> None:
        """End a text, after its last step."""


class OwnSource(DraftSource):
    """A source of this package, of which its engine asks more: nothing here is a step's part, and all may wait.

    Attributes:
        text, state, sampler: of the session, from its first text on.
        compiled_ahead: whether all that a step of it launches was, but for what its row models launch.
        remembers: whether it begins with what earlier calls left (``text.memory``, ``text.learned``, and the
            ``reference_ids``); beside a draft it is there where a shape has levels for it.
        at_once: whether, from its first text on, it proposes for several levels in one call where no other source is
            asked (:meth:`propose_rest`), to save the host's time.
    """

    compiled_ahead = remembers = at_once = False

    text: Text
    state: DecodeState
    sampler: Sampler

    def attach(self, text: Text) -> None:
        """Start a batch of texts, see :meth:`DraftSource.attach`; what stays for the session, :meth:`start` makes."""
        if text.first:
            self.text, self.state, self.sampler = text, text.state, text.sampler
            self.start(text)

    def start(self, text: Text) -> None:
        """Make the storage of a session."""

    def check(self, target: PreTrainedModel) -> None:
        """Refuse a target that the source cannot draft for; set what depends on it, as ``hidden_layers`` may.

        Called before every call, and on a session's copy before it is attached.

        Raises:
            ValueError: the reason and the cure.
        """

    def grow(self) -> None:
        """Make room for a longer text, as the state has; what was captured is captured anew."""

    def prepare(self, config: GraphConfig) -> None:
        """Get ready for steps of another shape."""

    def warm(self, level: Level, verified: Verified) -> Proposal | None:
        """Launch once what :meth:`propose` and :meth:`observe` launch, on a GPU and before a shape's first step.

        For kernels that are compiled when they are first used: no step should wait for that.

        Args:
            level: of the root alone, as wide as a frontier of the shape.
            verified: a step of no rows, of which nothing may be kept.

        Returns:
            What was proposed, so that its mixture is launched, too; ``None`` for a source that compiles nothing.
        """

    def propose_rest(self, level: Level) -> Asked:
        """Propose for this level and all behind it, and merge that into ``level.graph``: all E nodes with what it was.

        The graph must be what level by level gives.
        """
        raise NotImplementedError


def remembers(source: DraftSource) -> bool:
    """Return whether a source is one of this package that begins with what earlier calls left."""
    return isinstance(source, OwnSource) and source.remembers


def reaches(source: DraftSource, length: int) -> bool:
    """Return whether a source drafts behind texts of ``length`` tokens."""
    return source.max_length is None or length < source.max_length


def rows_at(values: Tensor, at: Tensor) -> Tensor:
    """Vectors [B, n, D] of values [B, S, D], where they lie, at places int64 [B, n]."""
    return values.gather(1, at.to(values.device)[..., None].expand(-1, -1, values.shape[2]))
