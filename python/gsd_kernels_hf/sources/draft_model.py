"""A small model of the same tokenizer as the draft."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig
from gsd_kernels.ops.step import feed_chain

from ..model import properties
from ..model.runner import RowModel
from .base import Text
from .expansion import Expansion


class DraftModel(Expansion):
    """A draft model with a cache of its own.

    The cache stays exact: level 0 feeds the newly emitted tokens as a chain, rather than keep keys and values that
    were computed in another path's context.

    Args:
        model: the draft.
        name: in statistics, and of its weight among the sources; several draft models need a name each.
    """

    name = "model"
    reads_prompt = compiled_ahead = True

    def __init__(self, model: PreTrainedModel, *, name: str = "model") -> None:
        self.model, self.forwards, self.name, self.max_length = model, (model,), name, properties.positions(model)

    def __repr__(self) -> str:
        return f"<DraftModel {self.name!r}: {type(self.model).__name__}>"

    def row_model(self, text: Text) -> RowModel:
        return text.rows_of(self.model)

    def start(self, text: Text) -> None:
        """Make the draft's cache, and count what is in it."""
        super().start(text)
        self.cached = torch.zeros_like(self.state.out_len)  # int32 [B]; tokens in its cache, padding included

    def attach(self, text: Text) -> None:
        super().attach(text)
        self.begin()

    def begin(self) -> None:
        """Begin a text, of which nothing is read yet."""
        self.unread = True  # a draft that does not pay reads no prompt
        self.cached.copy_(self.state.out_len - 1)

    def end(self) -> None:
        if not self.unread:  # else its cache holds what it held before
            self.rows.holds(self.state.tokens, self.cached)

    def prepare(self, config: GraphConfig) -> None:
        """Cache the prompt and what other shapes' steps emitted, until at most a step's tokens are new."""
        super().prepare(config)
        if config.depth == 0:
            return
        if self.unread:
            self.read_prompt()
            self.unread = False
        while int((self.state.out_len - self.cached).max()) > config.chain_rows:
            # Every root is left for level 0, whose logits follow it, but for one of a finished text that is there.
            self.feed(torch.maximum(self.state.out_len - 1, self.cached), config.chain_rows)

    def read_prompt(self) -> None:
        """Cache all of the prompt but its last token."""
        self.text.read_prompt(self.rows)

    def root_logits(self, config: GraphConfig) -> Tensor:
        return self.feed(self.state.out_len, config.chain_rows)

    def feed(self, end: Tensor, width: int, keep: int = 1) -> Tensor:
        """Cache up to ``width`` tokens before ``end`` [B] as a chain; logits after the last ones, [B, keep, V]."""
        chain = feed_chain(self.state.tokens, end, self.cached, width, backend=self.rows.backend)
        graph = chain.slots, chain.ancestor_mask, chain.depths, chain.node_depths
        logits = self.rows.rows(chain.token_ids, chain.kv_len, *graph, keep=keep)
        if self.rows.recurrent:
            count = self.cached - chain.kv_len
            place = torch.arange(width, dtype=torch.int32, device=count.device)
            first = width - count[:, None]
            # Of the keys and values, every one lies where it belongs.
            self.rows.cache.commit_states(torch.where(place < count[:, None], first + place, -1), count)
        return logits
