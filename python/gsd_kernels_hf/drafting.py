"""Draft sources: what proposes the continuations of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gsd_kernels import GraphConfig, TokenGraph, draft_candidates, merge
from gsd_kernels.config import MAX_CONTEXT
from gsd_kernels.graph import pack_bits

from .forward import RowModel


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

    config: GraphConfig
    graph: TokenGraph
    slot_depths: Tensor  # int32 [B, draft_slots]; depth below the root's children of the node in each slot


class ModelDraft:
    """A small model of the same tokenizer, which expands the frontier level by level.

    Its cache stays exact: level 0 feeds the newly emitted tokens as a chain, rather than keep keys and values that
    were computed in another path's context.
    """

    def __init__(self, rows: RowModel, state: DecodeState, vocab_size: int, warpers: dict[str, float]) -> None:
        self.rows, self.warpers = rows, warpers
        self.vocab_size = min(vocab_size, rows.vocab_size)
        self.seed = state.seed.to(rows.device)
        self.sequence_ids = state.sequence_ids.to(rows.device)
        self.cached = state.out_len - 1  # int32 [B]; tokens in the draft's cache, left padding included
        self.shapes: dict[GraphConfig, DraftShape] = {}

    def shape(self, config: GraphConfig, state: DecodeState) -> DraftShape:
        """Storage for ``config``, made at its first use."""
        if config not in self.shapes:
            batch, device = state.tokens.shape[0], state.tokens.device
            slot_depths = torch.zeros(batch, config.draft_slots, dtype=torch.int32, device=device)
            self.shapes[config] = DraftShape(config, TokenGraph.empty(batch, config, device), slot_depths)
        return self.shapes[config]

    def draft(self, state: DecodeState, config: GraphConfig) -> TokenGraph:
        """draft + merge, ``depth`` times. At most ``config.chain_rows`` tokens may be new since the last call."""
        shape = self.shape(config, state)
        graph, width = shape.graph, config.width
        graph.reset(state.root_tokens(), state.emitted_tail())
        frontier = graph.root_frontier()
        first_pick = state.out_len - state.kv_start  # [B]; index of the token after the root
        positions = first_pick[:, None]
        logits = self.feed(state, config.chain_rows)  # [B, 1, V]
        for level in range(config.depth):
            tokens, log_probs = self._candidates(logits, positions, config.branch, graph.token_ids.device)
            nxt = merge(
                graph,
                frontier,
                tokens,
                log_probs,
                level=level,
                width=width,
                merge_context=config.merge_context,
                log_sibling_ratio=config.log_sibling_ratio,
                log_min_prob=config.log_min_prob,
                backend=self.rows.backend,
            )
            if level + 1 == config.depth:
                break
            slots = level * width + torch.arange(width, device=graph.token_ids.device)
            shape.slot_depths[:, level * width : (level + 1) * width] = nxt.depths - 1
            frontier = nxt.node_ids
            positions = first_pick[:, None] + nxt.depths
            logits = self.rows.rows(
                nxt.token_ids,
                state.out_len,  # the root lies in the prefix
                slots,
                nxt.ancestor_mask,
                nxt.depths - 1,
                shape.slot_depths,
                keep=width,
            )
        return graph

    def feed(self, state: DecodeState, width: int) -> Tensor:
        """Level 0: cache up to ``width`` emitted tokens as a chain; logits after the last, [B, 1, V].

        The chain is right-aligned, so that its end is the last row; padding rows write above it.
        """
        count = (state.out_len - self.cached).clamp(max=width)  # [B]
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

    def _candidates(
        self, logits: Tensor, positions: Tensor, branch: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        tokens, log_probs = draft_candidates(
            logits[..., : self.vocab_size],
            positions.to(logits.device, torch.int32),
            branch=branch,
            seed=self.seed,
            sequence_ids=self.sequence_ids,
            backend=self.rows.backend,
            **self.warpers,
        )
        return tokens.to(device, non_blocking=True), log_probs.to(device, non_blocking=True)
