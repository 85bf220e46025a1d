"""Drafting with layers that read the target's features: what EAGLE-3, P-EAGLE and multi-token prediction share.

At every position the layers read a feature of the target and the embedding of the token after. Drafted tokens have no
feature of the target's. Recursively, the layers' own output stands in for it: one vector a node, which travels along
the drafted edges.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig

from gsd_kernels import GraphConfig
from gsd_kernels.ops.step import feed_rows

from ..model.attention import GraphInputs
from .base import Level, Text
from .chain import Chain
from .expansion import Expansion, NodeVectors
from .features import FeatureSource
from .fused_features import FusedFeatures


class Reading(FeatureSource):
    """A draft source whose layers read a feature and the token after it at every position.

    A subclass says how its layers run.

    Attributes:
        operator: the layers as one operator; ``None``: as modules.
        unknown: id and feature [D] that stand for a token behind the text, where rows of such are asked for.
    """

    ahead = 1
    operator: FusedFeatures | None = None
    unknown: tuple[int, Tensor]

    def run(self, embedded: Tensor, features: Tensor, positions: Tensor, inputs: GraphInputs) -> Tensor:
        """The layers' output of rows [B, R, D], their keys and values written where the cache is told to.

        Args:
            embedded: [B, R, D], of the token after each position.
            features: [B, R, D], of the target, or vectors of drafted nodes' parents.
            positions: int64 [B, R], in the text without padding.
            inputs: what the rows see.
        """
        raise NotImplementedError

    def outputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors that nodes hand on [B, R, D], and logits [B, R, V], of what :meth:`run` returned."""
        raise NotImplementedError

    def enter(self, end: Tensor, width: int) -> None:
        self.feed(end, width, keep=0)

    def feed(self, end: Tensor, width: int, *, unknown: int = 0, keep: int) -> tuple[Tensor, Tensor]:
        """Make up to ``width`` entries before ``end`` [B]; vectors and logits of the last ``keep`` rows.

        With rows of ``unknown`` tokens behind them, which see all before them and stay no entries.
        """
        chain = Chain.of(self.cached, end + unknown, width + unknown, self.state.kv_start)
        place = chain.place[:, :width]
        tokens = torch.where(chain.real[:, :width], self.state.tokens.gather(1, place + 1), 0)
        features = self.rows.at(place)
        if unknown:
            token, feature = self.unknown
            tokens = pad(tokens, (0, unknown), value=token)
            features = torch.cat([features, feature.expand(len(tokens), unknown, -1)], 1)
        found = self.forward(
            tokens.to(torch.int32),
            features,
            self.cached,
            chain.slots,
            chain.ancestor_mask,
            chain.depths,
            chain.node_depths,
            keep=keep,
        )
        self.cached.add_(chain.count - unknown)
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

        Arguments as of :meth:`~gsd_kernels_hf.model.runner.RowModel.rows`; features [B, R, D], as of :meth:`run`.
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
            return self.operator(fed, features, ancestor_mask, node_depths, kv_len, keep)
        inputs = self.rows.inputs(kv_len, ancestor_mask, fed.depths, node_depths)
        with self.rows.cache.writing(fed.places):
            hidden = self.run(self.embedded(fed.ids), features, fed.positions, inputs)
        return self.outputs(hidden[:, hidden.shape[1] - keep :])

    def known(self, logits: Tensor) -> Tensor:
        """Logits [B, n, V], all 0 where the text has no position with a feature yet, and nothing to go by."""
        return torch.where((self.state.out_len - 1 > self.state.kv_start)[:, None, None], logits, 0.0)


class Recursion(Reading, Expansion):
    """A draft source with one forward a level over the frontier, in which every node reads its parent's output.

    A subclass begins with :meth:`start`.
    """

    shares = (0.1,)  # beside another source, before anything was learned; what is too large costs rows at once

    def start(self, text: Text, config: PretrainedConfig) -> None:
        super().start(text, config)
        self.slot_depths: dict[GraphConfig, Tensor] = {}
        self.vectors = NodeVectors()

    def prepare(self, config: GraphConfig) -> None:
        """Make the storage of a shape, and let entries catch up."""
        Expansion.prepare(self, config)
        self.vectors.prepare(config, self.rows.features, self.rows.features.shape[2])
        FeatureSource.prepare(self, config)

    def root_logits(self, config: GraphConfig) -> Tensor:
        vectors, logits = self.feed(self.state.out_len - 1, config.chain_rows, keep=1)
        self.vectors.keep_root(config, vectors)
        return self.known(logits)

    def frontier_logits(self, level: Level) -> Tensor:
        frontier = level.frontier
        width = level.config.width
        found, logits = self.forward(
            frontier.token_ids,
            self.vectors.of_parents(level),
            self.state.out_len - 1,  # the root's entry lies in the prefix
            (level.number - 1) * width,
            frontier.ancestor_mask,
            frontier.depths,
            self.slot_depths[level.config],
            keep=width,
            shift=1,
        )
        self.vectors.keep(level, found)
        return logits

    def positions(self, level: Level, count: int) -> Tensor:
        return level.positions
