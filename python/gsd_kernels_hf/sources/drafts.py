"""Draft models as sources, by whether their tokens are the target's.

A draft of a tokenizer that shares few tokens with the target's has a text of its own: what the target has emitted,
re-tokenised as it grows, with a cache of its own. Its paths are read as text.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig, Rows, flatten
from gsd_kernels.config import MAX_ROWS

from .. import validate
from ..model import properties
from ..model.fused import rows_of
from ..model.recurrent.mixers import mixers_of
from ..model.runner import RowModel
from ..model.vocabulary import Speller, Translation
from ..records import Candidates, DecodeState
from .base import DraftSource, Level, OwnSource, Proposal, Text
from .expansion import DraftModel
from .mixer import Mixer
from .trie import Places, Trie, after_nodes, emitted_since, proposal_of, text_at_end

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

    translation: Translation

    def __init__(self, model: PreTrainedModel, translation: Translation, text: Text) -> None:
        super().__init__(model, translation)
        self.text, self.sampler = text, text.sampler
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
        back = self.cached.new_tensor(taken)
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
        own, roles = self.translation.assistant_tokenizer("")["input_ids"], self.translation.draft.roles
        for sequence, tokens in enumerate(emitted_since(self.text.state, self.taken)):
            self._extend(sequence, tokens)
            ids, bos = self.ids[sequence], roles.get("bos")
            if bos in own and ids[:1] != [bos]:  # the token first that texts begin with, where its tokenizer does so
                ids.insert(0, bos)
            if not ids:  # a text has a token at least
                ids.append(roles.get("eos", 0))
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


class Retokenised(OwnSource):
    """A draft model that drafts in its own tokens: a graph of its own, over a text and a cache of its own.

    SLEM of arXiv 2502.05202, for a graph: the text of each of the best paths is cut by the target's tokenizer, together
    with the last tokens of the text, and paths of one text meet. The probability of a token is that of the draft's
    tokens that spell it, summed over the ways that it is spelled. The last token of a path may merge with what would
    follow: nothing is proposed behind it. All of this is done on the host, once a step.

    Args:
        model: the draft, which is not changed.
        translation: between its tokenizer and the target's.
        name: in statistics, and of its weight among the sources.
    """

    other_tokens = on_host = reads_prompt = True

    def __init__(self, model: PreTrainedModel, translation: Translation, *, name: str) -> None:
        self.model, self.translation, self.name = model, translation, name
        self.forwards, self.most_tokens = (model,), properties.positions(model)
        self.speller = Speller(translation.tokenizer, translation.target)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {type(self.model).__name__}, read as text>"

    def check(self, target: PreTrainedModel) -> None:
        """Refuse models that lack tokens of their tokenizers, and a draft that cannot go back in its text.

        Raises:
            ValueError: it keeps a recurrent state, or tokens are lacking.
        """
        if recurrent := mixers_of(self.model):
            raise validate.Unsupported(
                f"assistant_model: {type(self.model).__name__} keeps a recurrent state ({recurrent[0][0]}), which does "
                "not go back to where the draft's tokens change as the text grows; give a draft that has most of the "
                "target's tokens"
            )
        self.translation.check(target, self.model)

    def attach(self, text: Text) -> None:
        super().attach(text)
        self.drafts.restart(text, {})

    def start(self, text: Text) -> None:
        """Make the draft's text and its graph."""
        self.own, vocabulary = Reader(self.model, self.translation, text), properties.vocabulary(self.model)
        self.drafts = Mixer([self.own], self.own.state, self.sampler.backend, vocab_size=vocabulary)

    def prepare(self, config: GraphConfig) -> None:
        """Cache the prompt and what other shapes' steps emitted."""
        if config.depth > 0:
            self._catch_up(config)

    def _catch_up(self, config: GraphConfig) -> GraphConfig:
        """Let the draft's text and cache be the target's text; the shape of the draft's graph.

        It has the levels of this one, no other source's, and rows to read the text.
        """
        shape = config.replace(history_depth=0, max_rows=min(MAX_ROWS, config.max_rows + 2 * END_ROWS))
        self.own.catch_up()
        if self.fits(shape.depth):
            self.own.reserve(int(self.own.state.out_len.max()), shape.cache_slots)
            self.drafts.prepare(shape)
        return shape

    def fits(self, depth: int = 1) -> bool:
        """Return whether the draft has positions for ``depth`` tokens behind its text, which are not the target's."""
        state = self.own.state
        return self.most_tokens is None or int(state.out_len.max()) + depth <= self.most_tokens

    @property
    def max_length(self) -> int | None:  # type: ignore[override]
        """The draft's positions; once there is a text of its own that counts: ``None``, or 0 where it is full."""
        return (None if self.fits() else 0) if hasattr(self, "own") else self.most_tokens

    def propose(self, level: Level) -> Proposal | None:
        """Propose what follows each frontier node in the re-tokenised paths; ``None`` beyond ``depth`` levels."""
        if level.number >= level.config.depth:
            return None
        if level.number == 0:
            self.places: Places = [{0: trie} for trie in self.look_ahead(level.config)]
        return proposal_of(
            after_nodes(self.places, level), level, self.sampler, rows=0 if level.number else self.forwarded
        )

    def look_ahead(self, config: GraphConfig) -> list[Trie]:
        """Draft, and read the best paths as the target's tokens: what may follow, by sequence."""
        shape, self.forwarded = self._catch_up(config), 0
        if not self.fits(shape.depth):
            return [Trie() for _ in self.own.ids]
        rows = flatten(self.drafts.draft(shape), shape.max_rows, int(shape.max_path or 0), backend=self.sampler.backend)
        self.forwarded = self.drafts.drafted_rows
        tries, begun = [Trie() for _ in self.own.ids], self.own.begun  # bytes that the target has emitted already
        tokens, probs = rows.token_ids.tolist(), rows.scores.exp().tolist()
        paths: list[tuple[int, list[int], list[int]]] = []
        jobs: list[tuple[bytes, bytes]] = []
        for sequence, path in self.paths(rows):
            known = map(self.translation.draft.spelled.get, (tokens[sequence][row] for row in path))
            pieces = list(takewhile(lambda piece: piece is not None, known))
            if (text := b"".join(pieces)).startswith(begun[sequence]):
                paths.append((sequence, path, list(accumulate(map(len, pieces)))))
                jobs.append((self.own.before(sequence), text[len(begun[sequence]) :]))
        for (sequence, path, ends), (_, text), spelled in zip(paths, jobs, self.speller.spell(jobs), strict=True):
            places = [path[bisect_left(ends, len(begun[sequence]) + end)] for end in spelled.ends]
            ahead = list(zip(spelled.tokens, places, strict=True))
            if len(path) > len(ends) and spelled.covered == len(text):  # a special token is behind it
                row = path[len(ends)]
                mark = self.translation.target.counterpart(tokens[sequence][row], self.translation.draft)
                ahead += [] if mark is None else [(mark, row)]
            tries[sequence].add(ahead, probs[sequence])
        return tries

    def paths(self, rows: Rows) -> Iterator[tuple[int, list[int]]]:
        """The paths to all leaves, from behind the root, each with its sequence; of texts that are not done."""
        columns = (rows.parent_rows, rows.num_rows[:, None], self.state.done[:, None])
        for sequence, (parents, (count,), (done,)) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            for leaf in sorted(set(range(1, count)) - set(parents[:count])) if not done else ():
                path = [leaf]
                while parents[path[0]] > 0:
                    path.insert(0, parents[path[0]])
                yield sequence, path


MIN_SHARED_FRACTION = 0.6
"""Of the larger vocabulary's tokens: with so many shared, the draft reads the target's text token by token."""


def draft_source(model: PreTrainedModel, name: str, translation: Translation | None) -> DraftSource:
    """The source of a draft model.

    Args:
        model: the draft.
        name: of the source.
        translation: between its tokenizer and the target's; ``None``: they are the same.
    """
    if translation is None or is_mapped(translation):
        return DraftModel(model, translation, name=name)
    return Retokenised(model, translation, name=name)


def is_mapped(translation: Translation) -> bool:
    """Return whether ids are mapped; else text is read."""
    return translation.shared.part >= MIN_SHARED_FRACTION


def translations_of(tokenizer: Any, assistant_tokenizer: Any, drafts: Sequence[object]) -> list[Translation | None]:
    """The translations between the target's tokenizer and that of each draft; ``None`` where it is the target's own.

    Args:
        tokenizer: of the target, or ``None``.
        assistant_tokenizer: of all drafts, or a list of theirs, ``None`` for one that has the target's. Without drafts
            it is ignored, as by transformers.
        drafts: the draft models.

    Raises:
        TypeError, ValueError: no tokenizers, or as many as there are drafts.
    """
    given = assistant_tokenizer if drafts else ()
    if isinstance(given, (list, tuple)):
        if len(given) != len(drafts):
            raise ValueError(
                f"assistant_tokenizer: expected one, or a list of {len(drafts)}, one for each draft model, got "
                f"{len(given)}"
            )
    else:
        given = [given] * len(drafts)
    if tokenizer is None and any(one is not None for one in given):
        raise ValueError(
            "assistant_tokenizer: needs the target's tokenizer beside it, to map the draft's tokens; pass tokenizer="
        )
    return [None if one is None or one is tokenizer else Translation.between(tokenizer, one) for one in given]


def check_probabilities(translations: Sequence[Translation | None], criterion: object) -> None:
    """Raise where a criterion needs the draft's probability of every target token, and a draft gives text.

    Raises:
        ValueError: the draft's tokens are re-tokenised.
    """
    for between in translations:
        if between is not None and not is_mapped(between):
            raise ValueError(
                f'criterion: "{criterion}" needs the draft\'s probability of every token of the target, and '
                f'assistant_tokenizer shares only {between.shared.part:.0%} of them; use criterion="exact"'
            )
