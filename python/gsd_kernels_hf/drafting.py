"""Draft sources: what proposes the continuations of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gsd_kernels import Frontier, GraphConfig, TokenGraph, draft_candidates, merge
from gsd_kernels.config import MAX_CONTEXT
from gsd_kernels.graph import pack_bits

from .forward import RowModel
from .history import History

Draw = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(level, draft logits [B, W, V], positions [B, W]) → tokens and log-probabilities [B, W, K]."""

NOTHING_KNOWN = -1
"""In place of a context length: the history was asked, and knew no continuation."""


@dataclass
class DecodeState:
    """Where every sequence stands; static shapes, on the target's device. The last token is the next root."""

    tokens: Tensor  # int64 [B, S]; padded prompt, then emitted tokens
    out_len: Tensor  # int32 [B]; tokens so far, left padding included
    kv_start: Tensor  # int32 [B]; left padding
    remaining: Tensor  # int32 [B]; tokens that may still be emitted
    done: Tensor  # bool [B]
    emitted: Tensor  # int32 [B, E]; what the last step emitted, first token first
    num_emitted: Tensor  # int32 [B]
    seed: Tensor  # int64 []
    sequence_ids: Tensor  # int32 [B]; row in the batch, which keys the noise

    def root_tokens(self) -> Tensor:
        return self.tokens.gather(1, self.out_len[:, None].long() - 1).squeeze(1)

    def emitted_tail(self) -> Tensor:
        """The tokens before the root, nearest first, −1 where the text begins: int32 [B, C]."""
        place = self.out_len[:, None].long() - 2 - torch.arange(MAX_CONTEXT, device=self.tokens.device)
        tail = self.tokens.gather(1, place.clamp(min=0))
        return torch.where(place >= self.kv_start[:, None], tail, -1).to(torch.int32)


@dataclass
class DraftShape:
    """The static storage of one :class:`~gsd_kernels.GraphConfig`."""

    graph: TokenGraph
    slot_depths: Tensor  # int32 [B, draft_slots]; depth, counted from the root's children, of the node in each slot
    drafted: Tensor  # float32 [B, N + 1, K]; log-probabilities of expanded nodes' candidates before calibration, or NaN
    matched: Tensor  # int32 [B, N + 1]; context length where the history was asked, 0 where the draft model was


class Calibration:
    """Draft log-probabilities → how often such a candidate really was the target's pick.

    A table of log-ratios by rank and draft probability, on the device. It changes what is worth a row, never what is
    accepted.
    """

    EDGES = (0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # between bins of draft probability

    def __init__(self, branch: int, device: torch.device) -> None:
        self.edges = torch.tensor(self.EDGES, device=device)
        self.log_ratio = torch.zeros(branch, len(self.EDGES) + 1, device=device)

    def __call__(self, log_probs: Tensor) -> Tensor:
        """float32 [B, W, K], best candidate first → calibrated, at most 0."""
        bins = torch.bucketize(log_probs.exp(), self.edges)  # [B, W, K]
        rank = torch.arange(log_probs.shape[2], device=log_probs.device)
        return (log_probs + self.log_ratio[rank, bins]).clamp(max=0.0)


class Drafter:
    """Grows the token graph from its sources: the draft model's levels, into which the history is mixed, then levels
    of the history alone."""

    def __init__(self, state: DecodeState, model: ModelDraft | None, history: History | None, backend: str) -> None:
        self.state, self.model, self.history, self.backend = state, model, history, backend
        self.shapes: dict[GraphConfig, DraftShape] = {}
        self.calibration: Calibration | None = None
        self.unread = True  # the history reads the text so far when it is first needed

    def shape(self, config: GraphConfig) -> DraftShape:
        """Storage for ``config``, made at its first use."""
        if config not in self.shapes:
            batch, device = self.state.tokens.shape[0], self.state.tokens.device
            slot_depths = torch.zeros(batch, config.draft_slots, dtype=torch.int32, device=device)
            graph = TokenGraph.empty(batch, config, device)
            drafted = torch.zeros(batch, config.node_capacity + 1, config.branch, device=device)
            matched = torch.zeros(batch, config.node_capacity + 1, dtype=torch.int32, device=device)
            self.shapes[config] = DraftShape(graph, slot_depths, drafted, matched)
        return self.shapes[config]

    def prepare(self, config: GraphConfig) -> None:
        """Before the first step of ``config``: read what was emitted without this drafter (waits for the device)."""
        if self.model is not None:
            self.model.catch_up(self.state, config.chain_rows)
        if self.history is not None and self.unread:
            self.history.read(self.state.tokens[:, : int(self.state.out_len.min())], self.state.kv_start)
            self.unread = False

    def draft(self, config: GraphConfig) -> TokenGraph:
        """draft + merge, once a level."""
        shape, state = self.shape(config), self.state
        graph = shape.graph
        graph.reset(state.root_tokens(), state.emitted_tail())
        shape.drafted.fill_(math.nan)
        first_pick = state.out_len - state.kv_start  # [B]; index of the token after the root
        frontier = Frontier(graph.root_frontier(), graph.token_ids[:, :1], graph.depths[:, :1], graph.ancestor_mask)
        for level in range(config.depth + (config.reuse_depth if self.history is not None else 0)):
            positions = first_pick[:, None] + frontier.depths
            if self.model is not None and level < config.depth:
                tokens, drafted = self.model.candidates(state, config, level, frontier, positions, shape.slot_depths)
                if self.history is not None:
                    tokens, drafted = self.history.mixed(tokens, drafted, graph, frontier.node_ids, positions)
                matched = torch.zeros_like(frontier.node_ids)
                log_probs = drafted if self.calibration is None else self.calibration(drafted)
            elif self.history is not None:
                tokens, drafted, matched = self.history.candidates(graph, frontier.node_ids, positions)
                log_probs = self.history.worth(drafted, matched)
                matched = torch.where(matched > 0, matched, NOTHING_KNOWN)
            if self.calibration is not None:
                at = torch.where(frontier.node_ids >= 0, frontier.node_ids, graph.capacity).long()  # padding: the last
                shape.drafted.scatter_(1, at[:, :, None].expand_as(drafted), drafted)
                shape.matched.scatter_(1, at, matched)
            frontier = merge(
                graph,
                frontier.node_ids,
                tokens,
                log_probs,
                level=level,
                width=config.width if level + 1 < config.depth else config.reuse_width,
                merge_context=config.merge_context,
                log_sibling_ratio=config.log_sibling_ratio,
                log_min_prob=config.log_min_prob,
                backend=self.backend,
            )
        return graph


class ModelDraft:
    """A small model of the same tokenizer, which expands the frontier level by level.

    Its cache stays exact: level 0 feeds the newly emitted tokens as a chain, rather than keep keys and values that
    were computed in another path's context.
    """

    def __init__(
        self,
        rows: RowModel,
        state: DecodeState,
        vocab_size: int,
        warpers: dict[str, float],
        prefill: Callable[[RowModel], None] | None = None,
    ) -> None:
        self.rows, self.warpers = rows, warpers
        self.prefill = prefill  # at first use: a draft that does not pay reads nothing
        self.draw: Draw | None = None  # in place of the best candidates, see criteria.SpeculativeSampling
        self.vocab_size = min(vocab_size, rows.vocab_size)
        self.seed = state.seed.to(rows.device)
        self.sequence_ids = state.sequence_ids.to(rows.device)
        self.cached = state.out_len - 1  # int32 [B]; tokens in the draft's cache, left padding included

    def candidates(
        self,
        state: DecodeState,
        config: GraphConfig,
        level: int,
        frontier: Frontier,
        positions: Tensor,  # int32 [B, W]; index of the token after each node
        slot_depths: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """One draft forward: tokens and log-probabilities [B, W, K] after every frontier node."""
        if level == 0:
            logits = self.feed(state, state.out_len, config.chain_rows)  # [B, 1, V]
        else:
            first = (level - 1) * config.width
            slots = first + torch.arange(config.width, device=state.tokens.device)
            slot_depths[:, first : first + config.width] = frontier.depths - 1
            logits = self.rows.rows(
                frontier.token_ids,
                state.out_len,  # the root lies in the prefix
                slots,
                frontier.ancestor_mask,
                frontier.depths - 1,
                slot_depths,
                keep=config.width,
            )
        logits, positions = logits[..., : self.vocab_size], positions.to(logits.device, torch.int32)
        if self.draw is not None:
            tokens, log_probs = self.draw(level, logits, positions)
        else:
            tokens, log_probs = draft_candidates(
                logits,
                positions,
                branch=config.branch,
                seed=self.seed,
                sequence_ids=self.sequence_ids,
                backend=self.rows.backend,
                **self.warpers,
            )
        device = state.tokens.device
        return tokens.to(device, non_blocking=True), log_probs.to(device, non_blocking=True)

    def catch_up(self, state: DecodeState, width: int) -> None:
        """Cache the prompt and what plain steps emitted, until at most ``width`` tokens are new (a host read)."""
        if self.prefill is not None:
            self.prefill(self.rows)
            self.prefill = None
        while int((state.out_len - self.cached).max()) > width:
            self.feed(state, state.out_len - 1, width)  # every root is left for level 0, whose logits follow it

    def feed(self, state: DecodeState, end: Tensor, width: int) -> Tensor:
        """Cache up to ``width`` tokens before ``end`` [B] as a chain; logits after the last, [B, 1, V].

        The chain is right-aligned, so that its end is the last row; padding rows write above it.
        """
        count = (end - self.cached).clamp(max=width)  # [B]
        row = torch.arange(width, device=state.tokens.device)
        link = row - (width - count[:, None])  # [B, E]; place in the chain, negative for padding
        real = link >= 0
        tokens = state.tokens.gather(1, (self.cached[:, None] + link.clamp(min=0)).long())
        slots = torch.where(real, link, count[:, None] + row)
        before = row <= torch.where(real, link, -1)[:, :, None]  # [B, E, E]
        mask = pack_bits(before | (row == slots[:, :, None]))
        logits = self.rows.rows(
            torch.where(real, tokens, 0),
            self.cached,
            slots,
            mask,
            link.clamp(min=0).to(torch.int32),
            row.to(torch.int32).expand_as(slots),
            keep=1,
        )
        self.cached.add_(count)
        return logits
