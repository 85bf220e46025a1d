"""A text in the tokens of a draft: what the target has emitted, re-tokenised as it grows, with a cache of its own."""

from __future__ import annotations

import math
from itertools import takewhile

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig

from ..model.fused import rows_of
from ..model.runner import RowModel
from ..model.spelling import Speller
from ..model.vocabulary import Translation
from ..records import Candidates, DecodeState
from .base import Level, Text
from .draft_model import DraftModel
from .trie import emitted_since, text_at_end

REOPENED_TOKENS = 4  # at the end of a text, which may merge with what follows
CONTEXT_TOKENS = 8  # before them, which decide how they are cut
END_ROWS = REOPENED_TOKENS + 1  # of the draft at the end of a text: after each of these tokens, and before them


class Reader(DraftModel):
    """A draft model that reads the texts of a session in its own tokens, and goes on from before the last of them.

    Every sequence begins at 0, whatever padding the target's has: lengths differ in any case. Special tokens go by
    content and role, those that the draft lacks by what they say. What was cut of a text changes at its end only, where
    tokens merge with what follows; the cache is read anew from there. A character that is not whole yet waits; bytes
    that the draft has no token for are left out.

    Args:
        model: the draft.
        translation: between the target's tokens and the draft's.
        text: the session.

    Attributes:
        state: the draft's tokens.
        ids: the same on the host, by sequence.
        open: bytes of every text that no token of the draft's has yet, by sequence.
        begun: bytes that this step's drafts begin with, since the target has emitted them: those, and what was taken
            back before them.
    """

    def __init__(self, model: PreTrainedModel, translation: Translation, text: Text) -> None:
        super().__init__(model)
        self.text, self.translation, self.sampler = text, translation, text.sampler
        self.speller = Speller(translation.assistant_tokenizer, translation.draft, skips=True)
        self.batch = text.state.tokens.shape[0]
        self.state = DecodeState.empty(self.batch, 1, 1, text.state.tokens.device)
        self.start(text)

    def row_model(self, text: Text) -> RowModel:
        rows = rows_of(self.model, 1, self.state.kv_start, self.sampler.backend)
        text.keep(rows)
        return rows

    def read_prompt(self) -> None:
        with self.text.reading():
            self.rows.prefill(self.state.tokens[:, : int(self.state.out_len.max()) - 1], None, None)

    def root_logits(self, config: GraphConfig) -> Tensor:
        counts = (self.state.out_len - self.cached).tolist()
        keep = min(END_ROWS, config.chain_rows)
        logits = self.feed(self.state.out_len, config.chain_rows, keep)
        after, taken = self.take_back(logits, [min(keep, count) for count in counts])
        back = torch.tensor(taken, dtype=torch.int32, device=self.cached.device)
        self.state.out_len.sub_(back)  # until the text is caught up with again
        self.cached.sub_(back)
        return after

    def candidates(self, level: Level, logits: Tensor) -> Candidates:
        """The likeliest tokens: the noise that the target draws with is that of its own tokens."""
        return self.sampler.candidates(logits, level.positions, level.config.branch, noise=False)

    def attach(self, text: Text) -> None:
        """Begin with the session's texts so far."""
        self.ids: list[list[int]] = [[] for _ in range(self.batch)]
        self.open = [b""] * self.batch
        self.taken = self.text.state.kv_start.tolist()  # of the target's tokens, padding included
        for sequence, tokens in enumerate(emitted_since(self.text.state, self.taken)):
            self._extend(sequence, tokens)
            self._put_first(self.ids[sequence])
        self._write([0] * self.batch)
        self.begin()

    def take_back(self, logits: Tensor, counts: list[int]) -> tuple[Tensor, list[int]]:
        """Where drafts go on from: behind the text, or before its last tokens, where the draft has a longer one.

        A text may end in the middle of what is one token to the draft, behind which it has never seen what follows.
        Of its last m tokens, with the probability p that it gave them, it says by another token that begins with their
        bytes and goes on with probability q: the m of the largest q / p is taken, 1 for none.

        Args:
            logits: float [B, n, V], the draft's behind the last n tokens of each text.
            counts: how many of them are of tokens, by sequence.

        Returns:
            Logits of what may come next, [B, 1, V], and m.
        """
        log_probs, taken = logits.float().log_softmax(-1), [0] * self.batch
        after = logits[:, -1:].clone()
        draft, ordinary = self.translation.draft, self.translation.draft.spelled
        for sequence, count in enumerate(counts):
            ids, begun, gone = self.ids[sequence], self.open[sequence], 0.0
            best = -math.inf if begun else 0.0  # of what follows behind the text, anything may
            for m, row in enumerate(log_probs[sequence].flip(0)[:count]):
                if m and ids[-m] not in ordinary:
                    break
                if m:
                    begun = ordinary[ids[-m]] + begun
                    gone += float(row[ids[-m]])
                if not begun:
                    continue
                fitting = draft.beginning(begun, longer=not self.open[sequence]).to(row.device)
                if not len(fitting):
                    continue
                odds = float(row[fitting].logsumexp(0)) - gone
                if odds > best:
                    best, taken[sequence], self.begun[sequence] = odds, m, begun
                    after[sequence] = -torch.inf
                    after[sequence, 0, fitting] = logits[sequence, -1 - m, fitting]
        return after, taken

    def _put_first(self, ids: list[int]) -> None:
        """Put the token first that texts begin with, where the draft's tokenizer does; a text has a token at least."""
        own = self.translation.assistant_tokenizer("")["input_ids"]
        bos = self.translation.draft.roles.get("bos")
        if bos in own and ids[:1] != [bos]:
            ids.insert(0, bos)
        if not ids:
            ids.append(self.translation.draft.roles.get("eos", 0))

    def catch_up(self) -> None:
        """Re-tokenise what is new; what is cached falls back to what stays."""
        new = emitted_since(self.text.state, self.taken)
        changed = [self._extend(sequence, tokens) for sequence, tokens in enumerate(new)]
        self._write(changed)
        # Of the last tokens logits are wanted in any case.
        stay = torch.minimum(self.state.out_len - END_ROWS, self.state.out_len.new_tensor(changed)).clamp(min=0)
        self.cached.copy_(torch.minimum(self.cached, stay))
        self.begun = list(self.open)

    def _write(self, changed: list[int]) -> None:
        """Let the state be the tokens, which have changed from these places on."""
        self.reserve(max(map(len, self.ids)))
        for row, ids, at in zip(self.state.tokens, self.ids, changed, strict=True):
            row[at : len(ids)] = row.new_tensor(ids[at:])
        self.state.out_len.copy_(self.state.out_len.new_tensor([len(ids) for ids in self.ids]))

    def reserve(self, length: int, slots: int = 0) -> None:
        """Make room for texts of ``length`` tokens, and ``slots`` cache positions behind them."""
        if length > self.state.tokens.shape[1]:
            self.state.grow(length + length // 2)
        if length + slots > self.rows.cache.capacity:
            self.rows.grow(length + length // 2 + slots)

    def _extend(self, sequence: int, tokens: list[int]) -> int:
        """Append tokens of the target to a text; where the draft's tokens change from."""
        target, draft = self.translation.target, self.translation.draft
        ids = self.ids[sequence]
        changed, text = len(ids), b""
        for token in tokens:
            if token in target.spelled:
                text += target.spelled[token]
                continue
            mark = draft.counterpart(token, target)
            if mark is None and token not in target.roles.values():
                text += target.contents.get(token, "").encode()
            if mark is not None:
                changed = min(changed, self._append(sequence, text))
                self.open[sequence], text = b"", b""
                ids.append(mark)
        return min(changed, self._append(sequence, text))

    def _append(self, sequence: int, text: bytes) -> int:
        """Append text to the draft's tokens of a sequence; where these change from."""
        ids = self.ids[sequence]
        text = self.open[sequence] + text
        if not text:
            return len(ids)
        ordinary = text_at_end(self.translation.draft, ids[-REOPENED_TOKENS - CONTEXT_TOKENS :])
        back = ordinary[-REOPENED_TOKENS:]
        before, again = b"".join(ordinary[:-REOPENED_TOKENS]), b"".join(back)
        (spelling,) = self.speller.spell([(before, again + text)])
        self.open[sequence] = (again + text)[spelling.covered :]
        at = len(ids) - len(back)
        same = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(ids[at:], spelling.tokens, strict=False)))
        ids[at + same :] = spelling.tokens[same:]
        return at + same

    def before(self, sequence: int) -> bytes:
        """The text that the last ordinary tokens spell, at most :data:`CONTEXT_TOKENS`, and what is open behind."""
        last = text_at_end(self.translation.draft, self.ids[sequence][-CONTEXT_TOKENS:])
        return b"".join(last) + self.open[sequence]
