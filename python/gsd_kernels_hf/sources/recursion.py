"""Drafting with the target's features: what EAGLE-3, P-EAGLE, multi-token prediction and Gemma's assistants share.

A row reads a feature and the embedding of the token after it. Drafted tokens have no feature of the target's, so the
layers' own output stands in for it: one vector a node, which travels along the drafted edges.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gsd_kernels import GraphConfig
from gsd_kernels.ops.feature_rows import feature_rows
from gsd_kernels.ops.step import feed_rows
from gsd_kernels.ops.step.reference import laid_out

from ..packed.modules import device_of_weights, dtype_of
from .base import Level, Text
from .expansion import Expansion, NodeVectors
from .features import FeatureSource
from .lattice import Lattice, shares_of


class Recursion(Expansion):
    """A draft source with one forward a level over the frontier, in which every node reads its parent's vector.

    Attributes:
        head: the drafter's output matrix, or the target's.
        vectors: of every expanded node.
    """

    shares = (0.1,)  # beside another source, before anything was learned; what is too large costs rows at once
    head: Any
    vectors: NodeVectors

    def at_root(self, config: GraphConfig) -> tuple[Tensor, Tensor]:
        """Forward up to the root: its vector [B, 1, D] and logits [B, 1, V]."""
        raise NotImplementedError

    def at_level(self, level: Level, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Forward a frontier, whose nodes read ``vectors`` [B, W, D]: theirs, and logits [B, W, V]."""
        raise NotImplementedError

    def root_logits(self, config: GraphConfig) -> Tensor:
        vectors, logits = self.at_root(config)
        self.vectors.keep_root(config, vectors)
        return logits

    def frontier_logits(self, level: Level) -> Tensor:
        vectors, logits = self.at_level(level, self.vectors.of_parents(level))
        self.vectors.keep(level, vectors)
        return logits

    def no_logits(self, count: int) -> Tensor:
        shape = (len(self.state.out_len), count, self.vocabulary.columns)
        return torch.zeros(shape, dtype=dtype_of(self.head), device=device_of_weights(self.head))


class Reading(FeatureSource):
    """A draft source whose layers have keys and values of their own, of every position that the target has read.

    Attributes:
        unknown: id and feature [D] that stand for a token behind the text, where rows of such are asked for.
    """

    ahead = 1
    unknown: tuple[int, Tensor]

    def enter(self, end: Tensor, width: int) -> None:
        self.feed(end, width, keep=0)

    def feed(self, end: Tensor, width: int, *, unknown: int = 0, keep: int) -> tuple[Tensor, Tensor]:
        """Make up to ``width`` entries before ``end`` [B]; vectors and logits of the last ``keep`` rows.

        With rows of ``unknown`` tokens behind them, which see all before them and stay no entries.
        """
        rows, cached, padded = width + unknown, self.cached, self.state.kv_start - self.cached
        count, real, slots, depths, mask = laid_out(end + unknown - cached, rows, padded)
        place = (cached[:, None] + depths[:, :width]).long()
        tokens = torch.where(real[:, :width], self.state.tokens.gather(1, place + 1), 0)
        features = self.rows.at(place)
        if unknown:
            token, feature = self.unknown
            tokens = pad(tokens, (0, unknown), value=token)
            features = torch.cat([features, feature.expand(len(tokens), unknown, -1)], 1)
        node_depths = torch.arange(rows, dtype=torch.int32, device=cached.device).expand_as(slots)
        found = self.forward(tokens.to(torch.int32), features, cached, slots, mask, depths, node_depths, keep=keep)
        self.cached.add_(count - unknown)
        return found

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        kv_len: Tensor,
        slots: Tensor | int,
        ancestor_mask: Tensor,
        depths: Tensor,
        node_depths: Tensor,
        *,
        keep: int,
        shift: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Vectors that nodes hand on [B, keep, D] and logits [B, keep, V] of the last rows.

        Arguments as of :meth:`~gsd_kernels_hf.model.runner.RowModel.rows`; features [B, R, D] of the target, or vectors
        of drafted nodes' parents.
        """
        given = isinstance(slots, Tensor)
        fed = feed_rows(
            tokens,
            depths,
            kv_len,
            self.rows.text_kv_start,
            vocab=self.embedding.num_embeddings,
            slots=slots if given else None,
            first_slot=0 if given else slots,
            shift=shift,
            node_depths=None if given else node_depths,
            dtype=torch.int64 if self.operator is None else torch.int32,
            backend=self.rows.backend,
        )
        fed = fed._replace(positions=fed.positions.clamp(min=0))  # left padding is read too
        if self.operator is not None:
            rows = fed.ids, features, fed.positions, fed.places, ancestor_mask, node_depths, kv_len
            logits, normed, state = self.operated(feature_rows, self.operator, *rows, keep=keep)
            return (normed if self.module.hands_on_normed else state).to(features.dtype), logits
        inputs = self.rows.inputs(kv_len, ancestor_mask, fed.depths, node_depths)
        with self.rows.cache.writing(fed.places):
            hidden = self.module.run(self.embedded(fed.ids), features, fed.positions, inputs, self.rows.cache)
        return self.module.outputs(hidden[:, hidden.shape[1] - keep :], self.head)

    def known(self, logits: Tensor) -> Tensor:
        """Logits [B, n, V], all 0 where the text has no position with a feature yet, and nothing to go by."""
        return torch.where((self.state.out_len - 1 > self.state.kv_start)[:, None, None], logits, 0.0)


class Recursive(Reading, Recursion):
    """The draft source of an Eagle3 or an Mtp."""

    def start(self, text: Text) -> None:
        super().start(text)
        self.slot_depths, self.vectors = {}, NodeVectors()

    def prepare(self, config: GraphConfig) -> None:
        """Make the storage of a shape, and let entries catch up."""
        Recursion.prepare(self, config)
        self.vectors.prepare(config, self.rows.features, self.module.sizes.hidden_size)
        FeatureSource.prepare(self, config)

    def at_root(self, config: GraphConfig) -> tuple[Tensor, Tensor]:
        vectors, logits = self.feed(self.state.out_len - 1, config.chain_rows, keep=1)
        return vectors, self.known(logits)

    def at_level(self, level: Level, vectors: Tensor) -> tuple[Tensor, Tensor]:
        tokens, *rest = self.level_rows(level, self.state.out_len - 1)  # the root's entry lies in the prefix
        return self.forward(tokens, vectors, *rest, keep=level.config.width, shift=1)


class Parallel(Reading, Lattice):
    """The draft source of an Eagle3 with masks, P-EAGLE (arXiv 2602.01469): several tokens from one forward a step.

    Behind the text's last position come rows of mask tokens, with one learned feature for all of them. Each sees the
    text and the masks before it, and predicts the token of its own depth: the same below every path.
    """

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.extra_slots = module.config.num_parallel - 1  # of the masks
        self.shares = shares_of(module.config.num_parallel)

    def start(self, text: Text) -> None:
        super().start(text)
        config, batch = self.module.config, len(self.cached)
        self.row = torch.arange(config.num_parallel, dtype=torch.int32, device=self.cached.device).expand(batch, -1)
        self.unknown = config.mask_token_id, self.module.mask_feature()

    def masks(self, config: GraphConfig) -> int:
        """Rows of masks in a step of a shape; its depth is as many as are read."""
        return min(config.depth, self.module.config.num_parallel) - 1

    def num_rows(self, config: GraphConfig) -> int:
        return config.chain_rows + self.masks(config)

    def step(self, level: Level) -> None:
        self.look_ahead(level, self.state.out_len - 1)

    def warm_step(self, level: Level) -> None:
        self.used = True  # it writes behind what a kept cache says that it holds
        self.look_ahead(level, self.cached)  # where no entry is missing

    def look_ahead(self, level: Level, end: Tensor) -> None:
        """Make entries before ``end`` [B], forward masks behind them, and keep what these say."""
        masks = self.masks(level.config)
        _, logits = self.feed(end, level.config.chain_rows, unknown=masks, keep=1 + masks)
        self.keep_positions(self.known(logits), level)
