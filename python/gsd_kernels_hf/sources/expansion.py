"""Expanding the frontier level by level with a forward of a model: what a draft model and layer skipping share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gsd_kernels import GraphConfig

from ..model.runner import RowModel
from ..records import Candidates, Verified
from .base import Level, OwnSource, Proposal, Text, rows_at
from .draft_vocabulary import DraftVocabulary


class Expansion(OwnSource):
    """A draft source with one forward a level over the frontier nodes; their keys and values lie behind the prefix.

    Attributes:
        vocabulary: of the model.
        stem: of the prefix's positions, how many are rows of this step.
        root_alone: whether level 0 forwards the root's row alone, rather than all tokens that the cache lacks.
    """

    stem = 0
    root_alone = False

    def start(self, text: Text) -> None:
        """Make the model's cache."""
        self.rows = self.row_model(text)
        self.vocabulary = DraftVocabulary(None, self.rows.vocab_size, text.target.vocab_size)
        self.slot_depths: dict[GraphConfig, Tensor] = {}

    def row_model(self, text: Text) -> RowModel:
        """The model that is forwarded, with its cache."""
        raise NotImplementedError

    def root_logits(self, config: GraphConfig) -> Tensor:
        """Forward the tokens up to the root that the cache lacks; logits after it, float [B, 1, V]."""
        raise NotImplementedError

    def first_rows(self, config: GraphConfig) -> int:
        """Rows of the forward up to the root."""
        return 1 if self.root_alone else config.chain_rows

    def prefix(self) -> Tensor:
        """Positions of the cache before a level's nodes, the root's included: int32 [B]."""
        return self.state.out_len

    def prepare(self, config: GraphConfig) -> None:
        """Make the storage of a shape: the depth of the node in each slot, counted from the root's children."""
        if config.depth > 0 and config not in self.slot_depths:
            shape = (self.state.tokens.shape[0], config.draft_slots)
            self.slot_depths[config] = torch.zeros(shape, dtype=torch.int32, device=self.rows.device)

    def frontier_logits(self, level: Level) -> Tensor:
        """Forward the frontier of a level beyond the root's; logits after its nodes, float [B, W, V]."""
        rows = self.level_rows(level, self.prefix())
        return self.rows.rows(*rows, keep=level.config.width, shift=1, stem=self.stem)

    def level_rows(self, level: Level, prefix: Tensor) -> tuple[Any, ...]:
        """A level's frontier behind ``prefix`` [B] as arguments of :meth:`RowModel.rows`."""
        config, frontier = level.config, level.frontier
        behind = prefix, (level.number - 1) * config.width
        return frontier.token_ids, *behind, frontier.ancestor_mask, frontier.depths, self.slot_depths[config]

    def warm(self, level: Level, verified: Verified) -> Proposal | None:
        """The attention of a step's forwards behind what is stored, and candidates after as many nodes."""
        config = level.config
        if config.depth == 0:
            return None
        stored = self.state.out_len - 1
        first = self.first_rows(config)
        self.rows.launch(stored, first, first)
        if config.depth > 1:
            self.rows.launch(stored, config.width, config.draft_slots)
        if self.text.draws is not None:
            return None
        return self.proposal(level, self.no_logits(level.frontier.token_ids.shape[1]))

    def no_logits(self, count: int) -> Tensor:
        """Logits as after ``count`` nodes, [B, count, V], all 0."""
        return self.rows.no_logits(count)

    def propose(self, level: Level) -> Proposal | None:
        """Candidates of one forward over the frontier; ``None`` beyond ``depth`` levels."""
        if level.number >= level.config.depth:
            return None
        return self.proposal(
            level, self.root_logits(level.config) if level.number == 0 else self.frontier_logits(level)
        )

    def proposal(self, level: Level, logits: Tensor) -> Proposal:
        """Candidates by logits [B, W, V] of the frontier, on the text's device."""
        tokens, log_probs = self.candidates(level, logits)
        device = self.state.tokens.device
        rows = level.config.width if level.number else self.first_rows(level.config)
        return Proposal(tokens.to(device, non_blocking=True), log_probs.to(device, non_blocking=True), rows=rows)

    def candidates(self, level: Level, logits: Tensor) -> Candidates:
        """The best after every frontier node by its logits [B, W, V], or what speculative sampling draws."""
        if self.text.draws is not None:
            return self.text.draws(level.number, self.vocabulary.whole(logits), level.positions.to(logits.device))
        return self.vocabulary.ranked(self.sampler, logits, level.positions, level.config.branch)


class NodeVectors:
    """One vector a node, which its children read: storage for every shape of a session.

    Attributes:
        by_shape: of every expanded node, [B, N + 1, D]; the last for padding.
    """

    def __init__(self) -> None:
        self.by_shape: dict[GraphConfig, Tensor] = {}

    def prepare(self, config: GraphConfig, like: Tensor, size: int) -> None:
        """Make the storage of a shape, for a batch as ``like`` has, [B, …], and vectors of this size."""
        if config.depth > 0 and config not in self.by_shape:
            self.by_shape[config] = like.new_zeros(len(like), config.node_capacity + 1, size)

    def keep_root(self, config: GraphConfig, found: Tensor) -> None:
        """Keep the root's, [B, 1, D]."""
        self.by_shape[config][:, :1] = found

    def of_parents(self, level: Level) -> Tensor:
        """The values of the primary parents of a level's frontier, [B, W, D]."""
        vectors, node = self.by_shape[level.config], level.frontier.node_ids.long()
        parent = level.graph.parents.gather(1, node.clamp(min=0)).clamp(min=0).long()
        return rows_at(vectors, parent)

    def keep(self, level: Level, found: Tensor) -> None:
        """Keep those of a level's frontier, [B, W, D]."""
        vectors, node = self.by_shape[level.config], level.frontier.node_ids.long()
        at = torch.where(node >= 0, node, vectors.shape[1] - 1).to(vectors.device)
        vectors[torch.arange(len(at), device=at.device)[:, None], at] = found  # a scatter of single numbers is slower
