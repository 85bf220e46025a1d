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

from ..model.attention import GraphInputs
from .base import Level, Text
from .chain import Chain
from .expansion import Expansion, NodeVectors
from .features import FeatureSource


class Reading(FeatureSource):
    """A draft source whose layers read a feature and the token after it at every position.

    A subclass says how its layers run.

    Attributes:
        unknown: id and feature [D] that stand for a token behind the text, where rows of such are asked for.
    """

    ahead = 1
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
        self.feed(end, width)

    def feed(self, end: Tensor, width: int, unknown: int = 0) -> Tensor:
        """Make up to ``width`` entries before ``end`` [B]; the output of the last, [B, 1, D].

        With rows of ``unknown`` tokens behind it, which see all before them and are not kept: theirs too,
        [B, 1 + unknown, D].
        """
        chain = Chain.of(self.cached, end + unknown, width + unknown, self.state.kv_start)
        place = chain.place[:, :width]
        tokens = torch.where(chain.real[:, :width], self.state.tokens.gather(1, place + 1), 0)
        features = self.rows.at(place)
        if unknown:
            token, feature = self.unknown
            tokens = pad(tokens, (0, unknown), value=token)
            features = torch.cat([features, feature.expand(len(tokens), unknown, -1)], 1)
        hidden = self.forward(
            tokens, features, self.cached, chain.slots, chain.ancestor_mask, chain.depths, chain.node_depths
        )
        self.cached.add_(chain.count - unknown)
        return hidden[:, -1 - unknown :]

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        kv_len: Tensor,
        slots: Tensor,
        ancestor_mask: Tensor,
        depths: Tensor,
        node_depths: Tensor,
    ) -> Tensor:
        """Outputs [B, R, D] of rows, as of :meth:`~gsd_kernels_hf.model.runner.RowModel.rows`."""
        embedded = self.embedded(tokens.long())
        inputs = self.rows.inputs(kv_len, ancestor_mask, depths, node_depths)
        with self.rows.cache.writing((kv_len[:, None] + slots).long()):
            return self.run(embedded, features, self.rows.positions(kv_len, depths), inputs)

    def known(self, logits: Tensor) -> Tensor:
        """Logits [B, n, V], all 0 where the text has no position with a feature yet, and nothing to go by."""
        return torch.where((self.state.out_len - 1 > self.state.kv_start)[:, None, None], logits, 0.0)


class Recursion(Reading, Expansion):
    """A draft source with one forward a level over the frontier, in which every node reads its parent's output.

    A subclass begins with :meth:`start`.
    """

    shares = (0.1,)  # beside another source, before anything was learned; what is too large costs rows at once

    def num_rows(self, config: GraphConfig) -> int:
        return config.draft_rows if config.depth > 0 else 0

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
        vectors, logits = self.outputs(self.feed(self.state.out_len - 1, config.chain_rows))
        self.vectors.keep_root(config, vectors)
        return self.known(logits)

    def frontier_logits(self, level: Level) -> Tensor:
        frontier = level.frontier
        first, width = (level.number - 1) * level.config.width, level.config.width
        slot_depths = self.slot_depths[level.config]
        slot_depths[:, first : first + width] = frontier.depths - 1
        hidden = self.forward(
            frontier.token_ids,
            self.vectors.of_parents(level),
            self.state.out_len - 1,  # the root's entry lies in the prefix
            first + torch.arange(width, device=slot_depths.device),
            frontier.ancestor_mask,
            frontier.depths - 1,
            slot_depths,
        )
        found, logits = self.outputs(hidden)
        self.vectors.keep(level, found)
        return logits

    def positions(self, level: Level, count: int) -> Tensor:
        return level.positions
