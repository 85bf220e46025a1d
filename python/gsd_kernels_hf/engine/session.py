"""The device state of one generation, and the step over it: draft → merge → flatten → attend → verify → commit.

Storage has the cache positions that a text's next steps need, not what it may become. Kernels that are compiled when
they are first used are launched once, ahead, for every shape that a policy may choose (:func:`warm`).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gsd_kernels import Acceptance, Frontier, GraphConfig, Rows, TokenGraph, flatten, mix_candidates
from gsd_kernels.ops.learn import Mixture
from gsd_kernels.ops.step import commit_text

from ..acceptance.criteria import ChainProposal, criterion_of
from ..acceptance.rule import AcceptanceRule, OnDevice, OnHost, padded, padded_path
from ..model import replay
from ..model.facts import Facts
from ..model.fused import rows_of
from ..model.prompt_inputs import RowsBehindInputs
from ..model.replay import hold
from ..model.runner import CachedText, Listener, RowModel
from ..policy.learning import Plan
from ..records import DecodeState, Sampler, Unverified, Verified, lone_root
from ..sources.base import DraftSource, Level, OwnSource
from ..sources.memory import HistoryMemory, Known
from ..sources.mixer import Mixer
from .resolved import Request, SessionKey
from .stats import Clock

GRAIN_TOKENS = 256
"""Positions by which storage is sized."""

FIRST_TOKENS, FIRST_GPU_TOKENS = 256, 1024
"""New tokens that a text has room for at first: on a GPU growing means capturing anew."""

GROWTH = 1.5
"""At most so much larger does storage become at once; what is copied in all is three texts at most."""


def rounded(positions: int) -> int:
    """A multiple of :data:`GRAIN_TOKENS`."""
    return -(-positions // GRAIN_TOKENS) * GRAIN_TOKENS


def rooms(request: Request, slots: int) -> tuple[int, int]:
    """Positions for a prompt, its first new tokens and a step, which has ``slots``; and those that a text can need."""
    first = FIRST_GPU_TOKENS if replay.is_gpu(request.device) else FIRST_TOKENS
    most = request.prompt_length + request.room + slots
    return min(most, rounded(request.prompt_length + first + slots)), most


class Session:
    """Batches of texts being written, one after the other, in the same storage.

    Nothing in :meth:`step` waits for the device, but for a rule on the host. A session is the
    :class:`~gsd_kernels_hf.sources.base.Text` of its sources.

    Args:
        key: what the calls that it serves have in common.
        facts: of the target.
        capacity: cache positions to begin with.
        sources: in the order in which they are mixed, of this session alone.

    Attributes:
        state, sampler, target, branch, first, draws, reference_ids, memory, learned, kv_len: see
            :class:`~gsd_kernels_hf.sources.base.Text`.
        plan: of the next step.
        rule: accepts rows; of the call.
        trims: draft only levels that have a node to expand, and forward only rows that hold a token; else shapes are
            static and nothing waits for the device.
        continues: whether the text goes on from what the target's cache held.
        most: cache positions that the text can need.
    """

    def __init__(self, key: SessionKey, facts: Facts, capacity: int, sources: Sequence[DraftSource]) -> None:
        device = facts.device
        self.key, self.backend, self.branch, self.capacity = key, key.backend, key.branch, capacity
        # Ranks that differ must find out by their hashes, not by messages of different sizes.
        self.trims = key.alone and device.type == "cpu"
        self.state = DecodeState.empty(key.batch, capacity + key.width, key.width, device)
        self.sampler = Sampler(
            torch.zeros((), dtype=torch.int64, device=device),
            torch.arange(key.batch, dtype=torch.int32, device=device),
            dict(key.warpers),
            self.backend,
        )
        self.proposal = ChainProposal(self.sampler) if key.draws else None
        self.draws = None if self.proposal is None else self.proposal.draw
        for source in sources:
            if isinstance(source, OwnSource):
                source.check(facts.model)  # and note what it needs of this target
        layers = tuple(sorted({layer for source in sources for layer in source.hidden_layers}))
        arguments = facts, capacity, self.state.kv_start, self.backend, layers
        self.target: RowModel = rows_of(*arguments) if key.axes is None else RowsBehindInputs(*arguments, axes=key.axes)
        self.target.watch()
        self.row_models: list[CachedText] = [self.target]
        self.eos_ids = torch.tensor(key.eos_ids, dtype=torch.int32, device=device)  # [E]
        self.kv_len = torch.zeros_like(self.state.out_len)  # int32 [B]
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)  # nodes, merges, accepted merges
        self.lone_root = lone_root(key.batch, device)
        self.plan = Plan(None)
        self.mixer = Mixer(sources, self.state, self.backend, vocab_size=self.target.vocab_size)
        self.first = True
        self.most: int
        self.structure: list[Any]  # of the models when the text was begun, see engine.engine
        self.contents: list[Any]
        self.captured: Any = None  # see engine.capture.CapturedStep
        self.warmed: tuple[int, int] | None = None  # the sizes for which kernels were compiled, see :func:`warm`
        self.compiled: frozenset[GraphConfig | None] = frozenset()  # the shapes of these kernels
        self.clock = Clock(device)
        self.rule: AcceptanceRule

    def begin(
        self,
        request: Request,
        weights: Mapping[str, Mixture],
        *,
        reuse_prefix: bool,
        memory: HistoryMemory | None,
        learned: Known | None,
    ) -> None:
        """Start a batch of texts: read what the caches do not hold of the prompt.

        Args:
            request: the call.
            weights: statistics of the sources, by name.
            reuse_prefix: whether keys and values of the last text may serve as the beginning of this one.
            memory: of earlier calls' histories; ``None``: they are not used, and this one's is not kept.
            learned: of the target; ``None`` for nothing.
        """
        self.request, self.clock, self.plan, self.memory = request, Clock(request.device), Plan(None), memory
        self.learned = learned
        pad = request.generation_config._pad_token_tensor
        self.state.restart(request.input_ids, request.kv_start, request.room, 0 if pad is None else int(pad))
        self.kv_len.copy_(self.state.out_len - 1)  # the root is not in the target's cache yet
        self.sampler.seed.fill_(request.seed)
        if self.proposal is not None:
            self.proposal.restart()
        self.counts.zero_()
        if isinstance(self.target, RowsBehindInputs):
            self.target.inputs = request.inputs
        if not reuse_prefix:
            for rows in self.row_models:
                rows.forget()
        self.target.restart(*self._prompt())
        self.continues = self.target.reused > 0
        # No cycle: caches go with their session, at once.
        self.mixer.restart(weakref.proxy(self), weights)
        with self.reading():
            self._read(self.target, self.mixer.read)
        self.first = False
        drafts, per_token = bool(self.mixer.every), request.per_token
        asked = request.options.criterion, self.sampler, self.proposal
        criterion = criterion_of(*asked, drafts=drafts, per_token=per_token)
        if not per_token:  # captured steps read the session's tensors, which are the same in every text
            self.rule = OnDevice(criterion, self.state, self.eos_ids, self.backend)
            return
        self.rule = OnHost(
            criterion,
            self.state,
            request.plan,
            request.eos_ids,
            request.criteria,
            together=request.lockstep,
            pads_finished=request.pads_finished,
            keep_scores=request.keeps_scores,
            keep_logits=request.keeps_logits,
        )

    def reserve(self, needed: int, most: int) -> None:
        """Make room, between steps, for the cache positions that are ``needed``; if there is not, for some ahead too.

        What was captured is captured anew.

        Args:
            needed: positions.
            most: the positions to make room for ahead.
        """
        if needed <= self.capacity:
            return
        self.capacity = max(needed, min(most, rounded(max(needed, int(GROWTH * self.capacity)))))
        hold(self.state.tokens)
        self.state.grow(self.capacity + self.key.width)
        for rows in self.row_models:
            rows.grow(max(self.capacity, rows.cache.capacity))  # one of a text of its own may be longer
        self.mixer.grow()
        self.recapture()

    def recapture(self) -> None:
        """Capture steps anew, since storage was replaced."""
        if self.captured is not None:
            self.captured.forget()

    def end(self) -> None:
        """End a text: note which tokens the caches hold, and drop the request."""
        self.target.holds(self.state.tokens, self.kv_len)
        for source in self.mixer.every:
            source.end()
        del self.request, self.rule

    @contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Tell users' sources the end of a text that an error cuts short: they may hold what has to be let go of."""
        self.mixer.attached = []  # none of the last text
        try:
            yield
        except BaseException:
            for source in self.mixer.attached:
                if not isinstance(source, OwnSource):
                    with suppress(Exception):  # the first error is the call's
                        source.end()
            raise

    @property
    def reference_ids(self) -> Tensor | None:
        """A text that the output may repeat, int64 [length] or [batch, length]; ``None`` for none."""
        return self.request.options.reference_ids

    @property
    def processors(self) -> Sequence[Any]:
        """Logits processors of the call."""
        return self.request.plan.processors

    @property
    def tokenizer(self) -> Any:
        """The call's tokenizer; ``None`` for none."""
        return self.request.options.tokenizer

    def rows_of(self, model: PreTrainedModel) -> RowModel:
        """``model`` with a cache of its own, which grows with the session."""
        rows = rows_of(model, self.capacity, self.state.kv_start, self.backend)
        self.row_models.append(rows)
        return rows

    def keep(self, rows: CachedText) -> None:
        """Let a source's cache grow with the session, and forget when reuse is off."""
        self.row_models.append(rows)

    def read_prompt(self, rows: RowModel) -> None:
        """Store all of the prompt but its last token in the cache of ``rows``, as far as it is not there."""
        with self.reading():
            rows.restart(*self._prompt())
            self._read(rows)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count what is done inside as the reading of a prompt, and no part of a step."""
        with self.clock.part("prefill"):
            yield
        self.clock.begin_step()

    def _read(self, rows: RowModel, listener: Listener | None = None) -> None:
        """Store what the cache of ``rows`` lacks; ``listener`` gets the hidden states."""
        (tokens, chunk), mask = self._prompt(), self.request.attention_mask
        rows.read(tokens, None if mask is None else mask[:, :-1], chunk, listener)

    def _prompt(self) -> tuple[Tensor, int | None]:
        """The prompt without its last token, which is the first root, and the size of the pieces it is read in."""
        chunk = self.request.generation_config.prefill_chunk_size
        return self.state.tokens[:, : self.request.prompt_length - 1], chunk

    def use(self, plan: Plan) -> None:
        """Get ready for steps of a plan."""
        self.clock.begin_step()
        config = plan.shape
        if config is not None and self.config != config:
            self.mixer.prepare(config)
        self.plan = plan

    @property
    def config(self) -> GraphConfig | None:
        """Shape of the next step; ``None`` is plain decoding."""
        return self.plan.shape

    @property
    def drafted_rows(self) -> int:
        """Rows that drafts forwarded in the last step, padding included."""
        return 0 if self.config is None else self.mixer.drafted_rows

    @property
    def max_path(self) -> int:
        """Depth of the deepest row of a step; 0 in plain decoding."""
        return int(self.config.max_path or 0) if self.config is not None else 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of all caches."""
        return sum(rows.nbytes for rows in self.row_models)

    def step(self) -> Verified:
        """Take one step: draft → merge → flatten → attend → verify → commit, then let sources observe it."""
        with self.clock.part("draft"):
            proposed = self.propose()
        with self.clock.part("target"):
            unverified = self.attend(*proposed)
        verified = self.settle(unverified, self.accept(unverified))
        with self.clock.part("draft"):
            self.mixer.observe(verified)
        self.rule.settle()
        return verified

    def propose(self) -> tuple[Rows, TokenGraph | None, Tensor]:
        """The step up to the target's forward: the rows to verify, the graph that they are of, the root's tail."""
        graph, config = None, self.config
        if config is None:
            rows, tail = self.lone_root, self.state.tail()
            rows.token_ids.copy_(self.state.root_tokens()[:, None])  # [B, 1]
        else:
            # A token that is drawn has a distribution at every level, and every one is verified: which of them are
            # must not depend on what was drawn.
            trims = self.trims and self.proposal is None
            graph = self.mixer.draft(config, trims=trims)
            tail = graph.contexts[:, 0]  # of the root: the text's
            if trims and self.plan.rows is not None:
                rows = self.plan.rows(graph, config, int(self.state.remaining.max()))
            else:
                rows = flatten(graph, config.max_rows, self.max_path, backend=self.backend)
                rows = rows.first(int(rows.num_rows.max())) if self.trims else rows  # [B, R] each
        return padded(rows, self.state, self.kv_len) if self.key.padding else rows, graph, tail

    def attend(self, rows: Rows, graph: TokenGraph | None, tail: Tensor) -> Unverified:
        """Forward the rows through the target."""
        count = rows.token_ids.shape[1]
        logits = self.target.rows(
            rows.token_ids,
            self.kv_len,
            0,
            rows.ancestor_mask,
            rows.depths,
            rows.depths,
            keep=count,
        ).to(self.kv_len.device)  # float [B, R, V]
        positions = self.target.after.to(rows.depths.device)
        return Unverified(graph, rows, logits, self.target.hidden, positions, tail)

    def accept(self, unverified: Unverified) -> Acceptance:
        """Accept rows by the call's rule, on the device or on the host."""
        return self.rule.accept(unverified, self.max_path)

    def keeping(self) -> Callable[[], None]:
        """A function that puts back what the last draft left on the host: levels, and what tokens were drawn from."""
        mixer, proposal = self.mixer, self.proposal
        current, distributions = copy.copy(mixer.current), [] if proposal is None else list(proposal.distributions)

        def put_back() -> None:
            mixer.current = current
            if proposal is not None:
                proposal.distributions = list(distributions)

        return put_back

    def settle(self, unverified: Unverified, accepted: Acceptance) -> Verified:
        """Keep the accepted rows' keys and values and append the emitted tokens, all of it on the device."""
        verified = Verified.of(unverified, accepted, self.backend)
        state, graph = self.state, verified.graph
        path = accepted.accepted_rows, accepted.num_accepted  # int32 [B, P], [B]
        if self.key.padding:
            path = padded_path(accepted, state.done)
        if isinstance(self.rule, OnHost):  # a processor may have made something of logits that are NaN
            self.target.cache.keep_marks(*path)
        self.target.cache.commit(*path, self.kv_len, backend=self.backend)
        commit_text(
            verified.tokens,
            accepted,
            eos_ids=self.eos_ids,
            tokens=state.tokens,
            out_len=state.out_len,
            remaining=state.remaining,
            done=state.done,
            emitted=state.emitted,
            num_emitted=state.num_emitted,
            counts=self.counts,
            nodes=None if graph is None else verified.nodes,
            graph=graph,
            backend=self.backend,
        )
        return verified


class _Silent(DraftSource):
    """Proposes nothing at any level."""

    def propose(self, level: Level) -> None:
        """Nothing."""


def warm(session: Session, shapes: Sequence[GraphConfig]) -> None:
    """Compile what steps of ``shapes`` launch, where a policy has several and the device is a GPU; once a size.

    Triton compiles merge, flatten, verify, commit and attention for their sizes, the samplers and the history's ops for
    the number of candidates. A policy that takes another shape in the middle of a text would stop there for seconds.
    The ops run here on a graph of the root alone, on logits of zeros and on cache slots that are free; they commit
    nothing and remember nothing.
    """
    if len(shapes) < 2 or not replay.is_gpu(session.state.tokens.device):
        return
    size = session.capacity, sum(rows.cache.layers[0].is_initialized for rows in session.row_models)
    if session.warmed == size:
        return
    batch, device, backend, mixer = session.key.batch, session.kv_len.device, session.backend, session.mixer
    silent = (_Silent(),) if mixer.lookups and mixer.grower is None else ()
    for shape in shapes:  # everything but the forwards: merging at every level, samplers, look-ups, mixing
        alone = Mixer(silent, session.state, backend, vocab_size=session.target.vocab_size)
        alone.prepare(shape)
        graph, max_path = alone.draft(shape), int(shape.max_path or 0)
        rows = flatten(graph, shape.max_rows, max_path, backend=backend)
        logits = session.target.no_logits(shape.max_rows).to(device)
        step = Unverified(graph, rows, logits, {}, rows.depths, graph.contexts[:, 0].clone())
        accepted = OnDevice(session.rule.criterion, session.state, session.eos_ids, backend).accept(step, max_path)
        accepted.num_accepted.zero_()
        session.target.cache.commit(
            accepted.accepted_rows, accepted.num_accepted, session.kv_len.clone(), backend=backend
        )
        step.rows = replace(rows, num_rows=torch.zeros_like(rows.num_rows))  # rows for shapes, none to learn from
        verified = Verified.of(step, accepted, backend)
        # Proposals after one node and after a frontier, what sources make of a step, and the mixture.
        for width in dict.fromkeys((1, shape.width, shape.history_width)):
            root = torch.zeros(batch, width, dtype=torch.int32, device=device)
            level = Level(0, shape, graph, Frontier(root, root, root, root[..., None]), session.kv_len)
            proposals = (source.warm(level, verified) for source in mixer.sources if isinstance(source, OwnSource))
            proposed = [proposal.candidates for proposal in proposals if proposal is not None]
            here = [tuple(tensor.to(device) for tensor in candidates) for candidates in proposed]
            for first, other in pairwise(here):
                weight = torch.zeros(batch, width, device=device, dtype=torch.float32)
                mix_candidates(*first, *other, weight, backend=backend)
    for count in sorted({1, *(shape.max_rows for shape in shapes)}):
        session.target.launch(session.kv_len, count, count)
    session.warmed, session.compiled = size, frozenset(shapes)
    session.clock.begin_step()  # compiling is no part of it
