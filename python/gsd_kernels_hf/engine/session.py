"""The device state of one generation, and the step over it: draft → merge → flatten → attend → verify → commit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig, Rows, TokenGraph, flatten

from ..acceptance.criteria import ChainProposal, criterion_of
from ..acceptance.rule import AcceptanceRule, OnDevice
from ..acceptance.tokenwise import TokenByToken
from ..model.fused import draft_rows
from ..model.runner import RowModel
from ..records import DecodeState, Sampler, Verified
from ..sources.base import DraftSource
from ..sources.drafter import Drafter
from ..sources.weights import SourceWeights
from .request import Request
from .stats import Clock


class Session:
    """One batch of texts being written. Nothing in :meth:`step` waits for the device, but for a rule on the host.

    It is the :class:`~gsd_kernels_hf.sources.base.Text` of the sources.

    Args:
        request: the call.
        shapes: the largest shapes of a step, which storage is made for; none for plain decoding.
        alone: whether no other rank must do the same at the same time.

    Attributes:
        trims: forward only rows that hold a token; else shapes are static and nothing waits for the device.
    """

    def __init__(self, request: Request, shapes: Sequence[GraphConfig], *, alone: bool = True) -> None:
        device = request.device
        self.request, self.backend, self.alone = request, request.options.backend, alone
        # Ranks that differ must find out by their hashes, not by messages of different sizes.
        self.trims = alone and device.type == "cpu"
        self.clock = Clock(device)
        self.branch = max((shape.branch for shape in shapes), default=1)
        pad = request.generation_config._pad_token_tensor
        self.state = DecodeState.of_prompt(
            request.input_ids,
            request.attention_mask,
            room=request.room,
            width=max((shape.chain_rows for shape in shapes), default=1),
            pad=0 if pad is None else int(pad),
            device=device,
        )
        batch = request.batch
        self.sampler = Sampler(
            torch.tensor(request.seed, dtype=torch.int64, device=device),
            torch.arange(batch, dtype=torch.int32, device=device),
            request.plan.warper_arguments,
            self.backend,
        )
        slots = max((shape.cache_slots for shape in shapes), default=1)
        self.capacity = request.prompt_length + request.room + slots
        self.target = RowModel(request.model, self.capacity, self.state.kv_start, self.backend)
        self.row_models = [self.target]
        self.eos_ids = torch.tensor(sorted(request.eos_ids), dtype=torch.int32, device=device)
        self.kv_len = self.state.out_len - 1  # the root is not in the target's cache yet
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)  # nodes, merges, accepted merges
        self.lone_root = lone_root(batch, device)
        self.config: GraphConfig | None = None
        self.drafter: Drafter | None = None
        self.rule: AcceptanceRule

    def begin(
        self, sources: Sequence[DraftSource], weights: dict[str, SourceWeights], proposal: ChainProposal | None
    ) -> None:
        """Read the prompt, start the sources and choose the rule."""
        if sources:
            self.drafter = Drafter(sources, weights, self.state, self.backend)
            self.target.keeps_hidden = any(source.needs_hidden for source in sources)
        self.read_prompt(self.target)
        if self.drafter is not None:
            self.drafter.begin(self)
        request = self.request
        criterion = criterion_of(request.options.criterion, self.sampler, proposal, drafts=bool(sources))
        if request.per_token:
            self.rule = TokenByToken(
                criterion,
                self.state,
                request.plan,
                request.eos_ids,
                request.criteria,
                pads_finished=request.pads_finished,
                keep_scores=request.keeps_scores,
                keep_logits=request.keeps_logits,
            )
        else:
            self.rule = OnDevice(criterion, self.state, self.eos_ids, self.backend)

    def rows_of(self, model: PreTrainedModel) -> RowModel:
        """A draft with a cache of its own for this text, in which nothing is stored yet."""
        rows = draft_rows(model, self.capacity, self.state.kv_start, self.backend)
        self.row_models.append(rows)
        return rows

    def read_prompt(self, rows: RowModel) -> None:
        """Store all of the prompt but its last token in the cache of ``rows``."""
        ids, mask = self.request.input_ids, self.request.attention_mask
        with self.clock.part("prefill"):
            chunk = self.request.generation_config.prefill_chunk_size
            rows.prefill(ids[:, :-1], None if mask is None else mask[:, :-1], chunk)

    def use(self, config: GraphConfig | None) -> None:
        """Take ``config`` for the next steps; ``None`` is plain decoding."""
        self.clock.begin_step()
        if config is not None and self.config != config:
            assert self.drafter is not None
            self.drafter.prepare(config)
        self.config = config

    @property
    def drafted_rows(self) -> int:
        """Rows that drafts compute in a step."""
        return 0 if self.config is None or self.drafter is None else self.drafter.num_rows(self.config)

    @property
    def max_path(self) -> int:
        """Deepest row of a step."""
        return int(self.config.max_path or 0) if self.config is not None else 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of all caches."""
        return sum(rows.cache.nbytes for rows in self.row_models)

    def step(self) -> Verified:
        """One whole step on the device."""
        tail = self.state.tail()
        graph = self.draft()
        rows = self.flatten(graph)
        logits = self.attend(rows)
        accepted = self.rule.accept(rows, logits, self.positions(rows), self.max_path)
        verified = Verified.of(graph, rows, logits, self.target.hidden, accepted, tail)
        self.commit(verified)
        if self.drafter is not None:
            with self.clock.part("draft"):
                self.drafter.observe(verified)
        return verified

    def draft(self) -> TokenGraph | None:
        """draft + merge, once a level."""
        if self.drafter is None or self.config is None:
            return None
        with self.clock.part("draft"):
            return self.drafter.draft(self.config)

    def flatten(self, graph: TokenGraph | None) -> Rows:
        """The best paths of the graph as rows; the root alone in plain decoding."""
        if graph is None or self.config is None:
            self.lone_root.token_ids.copy_(self.state.root_tokens()[:, None])
            return self.lone_root
        with self.clock.part("draft"):
            rows = flatten(graph, self.config.max_rows, self.max_path, backend=self.backend)
            return rows.first(int(rows.num_rows.max())) if self.trims else rows

    def attend(self, rows: Rows) -> Tensor:
        """The target's logits at every row, [B, R, V]."""
        count = rows.token_ids.shape[1]
        with self.clock.part("target"):
            logits = self.target.rows(
                rows.token_ids,
                self.kv_len,
                torch.arange(count, device=self.kv_len.device),
                rows.ancestor_mask,
                rows.depths,
                rows.depths,
                keep=count,
            )
        return logits.to(self.kv_len.device)

    def positions(self, rows: Rows) -> Tensor:
        """Index of the token picked after each row, padding excluded: int32 [B, R]."""
        return (self.kv_len - self.state.kv_start)[:, None] + rows.depths + 1

    def commit(self, verified: Verified) -> None:
        """Keep the accepted rows' keys and values and append the emitted tokens."""
        state, accepted, tokens = self.state, verified.accepted, verified.tokens
        self.target.cache.commit(accepted.accepted_rows, accepted.num_accepted, self.kv_len, backend=self.backend)
        count, place = accepted.num_accepted, torch.arange(tokens.shape[1], device=tokens.device)
        new = place < count[:, None]
        state.emitted[:, : tokens.shape[1]] = tokens
        state.num_emitted.copy_(count)
        at = (state.out_len[:, None] + place).long()
        state.tokens.scatter_(1, at, torch.where(new, tokens.long(), state.tokens.gather(1, at)))
        state.out_len.add_(count)
        state.remaining.sub_(count)
        ended = (accepted.next_token[:, None] == self.eos_ids).any(1) | (state.remaining <= 0)
        state.done.logical_or_(ended & (count > 0))
        self.rule.settle()
        if verified.graph is not None:
            self.counts += torch.stack(
                [verified.graph.num_nodes.sum(), verified.graph.num_merges.sum(), accepted_merges(verified)]
            )


def accepted_merges(verified: Verified) -> Tensor:
    """Merge edges on accepted paths: rows whose node's primary parent is not the node that they came from."""
    node, path = verified.nodes[:, 1:], verified.accepted.accepted_rows[:, 1:]
    primary = verified.graph.parents.gather(1, node.clamp(min=0).long())
    return ((path >= 0) & (primary != verified.nodes[:, :-1])).sum()


def lone_root(batch: int, device: torch.device) -> Rows:
    """The rows of plain decoding: the root of every sequence."""

    def per_row(value: int, *shape: int) -> Tensor:
        return torch.full((batch, *(shape or (1,))), value, dtype=torch.int32, device=device)

    return Rows(
        token_ids=per_row(0),
        parent_rows=per_row(-1),
        depths=per_row(0),
        ancestor_mask=per_row(1, 1, 1),
        node_ids=per_row(0),
        scores=torch.zeros(batch, 1, device=device),
        num_rows=torch.ones(batch, dtype=torch.int32, device=device),
    )
