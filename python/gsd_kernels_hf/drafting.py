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


class ModelDraft:
    """A small model of the same tokenizer, which expands the frontier level by level.

    Its cache stays exact: level 0 feeds the newly emitted tokens as a chain, rather than keep keys and values that
    were computed in another path's context.
    """

    def __init__(
        self, rows: RowModel, config: GraphConfig, state: DecodeState, vocab_size: int, warpers: dict[str, float]
    ) -> None:
        self.rows, self.config, self.warpers = rows, config, warpers
        self.vocab_size = min(vocab_size, rows.vocab_size)
        batch, device = state.tokens.shape[0], state.tokens.device
        self.graph = TokenGraph.empty(batch, config, device)
        self.slot_depths = torch.zeros(batch, config.draft_slots, dtype=torch.int32, device=device)
        self.seed = state.seed.to(rows.device)
        self.sequence_ids = state.sequence_ids.to(rows.device)
        self.rows_per_step = config.chain_rows + config.draft_slots

    def draft(self, state: DecodeState) -> TokenGraph:
        """draft + merge, ``depth`` times."""
        config, graph = self.config, self.graph
        graph.reset(state.root_tokens(), state.emitted_tail())
        frontier = graph.root_frontier()
        first_pick = state.out_len - state.kv_start  # [B]; index of the token after the root
        positions = first_pick[:, None]
        logits = self._chain_logits(state)  # [B, 1, V]
        for level in range(config.depth):
            tokens, log_probs = self._candidates(logits, positions)
            nxt = merge(
                graph,
                frontier,
                tokens,
                log_probs,
                level=level,
                width=config.width,
                merge_context=config.merge_context,
                log_sibling_ratio=config.log_sibling_ratio,
                log_min_prob=config.log_min_prob,
                backend=self.rows.backend,
            )
            if level + 1 == config.depth:
                break
            slots = level * config.width + torch.arange(config.width, device=graph.token_ids.device)
            self.slot_depths[:, level * config.width : (level + 1) * config.width] = nxt.depths - 1
            frontier = nxt.node_ids
            positions = first_pick[:, None] + nxt.depths
            logits = self.rows.rows(
                nxt.token_ids,
                state.out_len,  # the root lies in the prefix
                slots,
                nxt.ancestor_mask,
                nxt.depths - 1,
                self.slot_depths,
                keep=config.width,
            )
        return graph

    def _chain_logits(self, state: DecodeState) -> Tensor:
        """Level 0: feed the emitted tokens, right-aligned so that the root is the last row. Padding writes above."""
        width = self.config.chain_rows
        row = torch.arange(width, device=state.tokens.device)
        link = row - (width - state.num_emitted[:, None])  # [B, E]; place in the chain, negative for padding
        real = link >= 0
        tokens = state.emitted[:, :width].gather(1, link.clamp(min=0).long())
        slots = torch.where(real, link, state.num_emitted[:, None] + row)
        before = row <= torch.where(real, link, -1)[:, :, None]  # [B, E, E]
        mask = pack_bits(before | (row == slots[:, :, None]))
        return self.rows.rows(
            torch.where(real, tokens, 0),
            state.out_len - state.num_emitted,
            slots,
            mask,
            link.clamp(min=0).to(torch.int32),
            row.to(torch.int32).expand_as(slots),
            keep=1,
        )

    def _candidates(self, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        tokens, log_probs = draft_candidates(
            logits[..., : self.vocab_size],
            positions.to(logits.device, torch.int32),
            branch=self.config.branch,
            seed=self.seed,
            sequence_ids=self.sequence_ids,
            backend=self.rows.backend,
            **self.warpers,
        )
        device = self.graph.token_ids.device
        return tokens.to(device, non_blocking=True), log_probs.to(device, non_blocking=True)
