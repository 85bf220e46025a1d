"""A draft model of another tokenizer that shares most of its tokens with the target's: ids are mapped both ways."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..model.runner import Listener, RowModel
from ..model.vocabulary import SharedTokens, Translation
from .base import Text
from .draft_model import DraftModel


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


class Translated(DraftModel):
    """A draft model with a cache of its own, whose text is the target's, token by token.

    TLI of arXiv 2502.05202, at every node of the graph: what the draft gives to tokens that the target does not have is
    left out, and the rest renormalised. In place of a token that it does not have the draft reads the longest of its
    own that the bytes end with.

    Args:
        model: the draft, which is not changed.
        translation: between its tokenizer and the target's.
        name: see :class:`DraftModel`.
    """

    other_tokens, compiled_ahead = True, False

    def __init__(self, model: PreTrainedModel, translation: Translation, *, name: str = "model") -> None:
        super().__init__(model, name=name)
        self.translation = translation

    def __repr__(self) -> str:
        part = f"{self.translation.shared.part:.0%} of its tokens shared"
        return f"<{type(self).__name__} {self.name!r}: {type(self.model).__name__}, {part}>"

    def check(self, target: PreTrainedModel) -> None:
        """Refuse models that lack tokens of their tokenizers."""
        self.translation.check(target, self.model)

    def row_model(self, text: Text) -> RowModel:
        rows = TranslatedRows(text.rows_of(self.model), self.translation.shared, text.target.vocab_size)
        return rows  # type: ignore[return-value]  # all that is asked of one
