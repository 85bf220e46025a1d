"""A small model as the draft, whose text is the target's, token by token.

Its tokenizer is the target's, or one that shares most of its tokens: then ids are mapped both ways.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig
from gsd_kernels.ops.step import feed_chain

from ..model import properties
from ..model.runner import Listener, RowModel
from ..model.vocabulary import SharedTokens, Translation
from .base import Text
from .expansion import Expansion


class TranslatedRows:
    """A draft's rows in the target's ids; all else is the draft's own.

    Args:
        rows: of the draft.
        shared: what the target's tokens are to it.
        vocab_size: V, of the target.
    """

    def __init__(self, rows: RowModel, shared: SharedTokens, vocab_size: int) -> None:
        self.own, self.vocab_size = rows, vocab_size
        lacking = vocab_size - len(shared.same)  # output rows that are no token
        same, reads = (torch.nn.functional.pad(ids, (0, lacking), value=-1) for ids in (shared.same, shared.reads))
        self.absent = (same < 0).to(rows.device)  # bool [V], target's tokens that the draft does not have
        self.same = same.clamp(min=0).to(rows.device)  # int64 [V], the draft's id of each
        self.reads = reads.clamp(min=0).to(rows.device)  # int64 [V], what the draft reads for each

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["own"], name)

    def of_draft(self, token_ids: Tensor) -> Tensor:
        """The draft's ids for target ids of any shape, in their dtype."""
        ids = self.reads[token_ids.to(self.reads.device).long().clamp(0, self.vocab_size - 1)]
        return ids.to(token_ids.device, token_ids.dtype)

    def of_target(self, logits: Tensor) -> Tensor:
        """Logits of the draft's tokens as the target's, −inf where it has none: [B, R, draft's] → [B, R, V]."""
        return logits.index_select(-1, self.same).masked_fill_(self.absent, -torch.inf)

    def read(
        self, input_ids: Tensor, attention_mask: Tensor | None, chunk: int | None, listener: Listener | None = None
    ) -> None:
        """Read like :meth:`RowModel.read`."""
        self.own.read(self.of_draft(input_ids), attention_mask, chunk, listener)

    def rows(self, token_ids: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Forward like :meth:`RowModel.rows`."""
        return self.of_target(self.own.rows(self.of_draft(token_ids), *arguments, **options))

    def no_logits(self, count: int) -> Tensor:
        """Give what :meth:`RowModel.no_logits` gives."""
        return self.of_target(self.own.no_logits(count))


class DraftModel(Expansion):
    """A draft model with a cache of its own.

    The cache stays exact: level 0 feeds the newly emitted tokens as a chain, rather than keep keys and values that
    were computed in another path's context.

    With other tokens it is TLI of arXiv 2502.05202, at every node of the graph: what the draft gives to tokens that the
    target does not have is left out, and the rest renormalised. In place of a token that it does not have the draft
    reads the longest of its own that the bytes end with.

    Args:
        model: the draft, which is not changed.
        translation: between its tokenizer and the target's; ``None``: they are the same.
        name: in statistics, and of its weight among the sources; several draft models need a name each.
    """

    reads_prompt = True

    def __init__(self, model: PreTrainedModel, translation: Translation | None = None, *, name: str = "model") -> None:
        self.model, self.forwards, self.name, self.max_length = model, (model,), name, properties.positions(model)
        self.translation, self.other_tokens = translation, translation is not None
        self.compiled_ahead = translation is None

    def __repr__(self) -> str:
        part = "" if self.translation is None else f", {self.translation.shared.part:.0%} of its tokens shared"
        return f"<DraftModel {self.name!r}: {type(self.model).__name__}{part}>"

    def check(self, target: PreTrainedModel) -> None:
        """Refuse models of two tokenizers that lack tokens of theirs."""
        if self.translation is not None:
            self.translation.check(target, self.model)

    def row_model(self, text: Text) -> RowModel:
        rows = text.rows_of(self.model)
        if self.translation is None:
            return rows
        translated: Any = TranslatedRows(rows, self.translation.shared, text.target.vocab_size)
        return translated  # all that is asked of a row model

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
