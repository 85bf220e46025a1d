"""Grammar: a draft source without a forward, from what a call's grammar lets follow."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch

from ..model.spelling import Speller
from ..model.vocabulary import NO_TEXT, Vocabulary
from .base import DraftSource, Level, Proposal, Text
from .matchers import Walk, vocabulary_in, walks_of
from .trie import Trie, proposal_of

CONTEXT_TOKENS = 8  # tokens before the root, which decide how what follows is cut
CUT_BYTES = 32  # bytes before a text, behind which it is cut
LOOKAHEAD_BYTES = 96  # bytes that are looked ahead
MAX_CHOICES = 4  # ways to go on that are all followed; with more of them the text is free
EXPANDED_NODES = 6  # nodes of a step behind other sources' tokens that are looked ahead from
SPACE = b" \n\t\r"
ENDS = b'"}],:'  # what may end a value that is free
MARKS = b'"{}[],:'  # behind which a grammar may know what follows
SPACED = b":,"  # behind which a space is likelier than none, where the text has not shown it
P_LAYOUT, P_END, P_LAST, P_SECOND = 0.9, 1e-6, 0.6, 0.15
"""Probabilities: of the guess where space is free; of the end of a free value, which takes no row by itself and goes on
behind that end where another source proposes it; of a token that may merge with free text behind it; of the longest
tokens where the tokenizer has others."""

INDEX_EDGES = (0.3, 0.8)  # between the indices


class Ahead(NamedTuple):
    """A text that may follow.

    Attributes:
        text: the bytes.
        log_probs: of the text up to the end of each byte.
        ends: tokens that end the text there; empty where it goes on, freely or beyond what was looked at.
        end: log-probability of the text and that it ends.
    """

    text: bytes
    log_probs: list[float]
    ends: list[int]
    end: float = 0.0


class Grammar(DraftSource):
    """A source of what the grammar of a call's processors forces, or all but forces, as the tokens that spell it.

    The grammar's state is a copy that follows the text; the processors' own are not touched. From the root, and from
    nodes of other sources behind punctuation, it is walked on as long as one text can follow, or a few: where space
    alone is free it is laid out as the text has been. A text is cut as the tokenizer does behind what was written, and
    into the longest tokens: both are in the graph. The last token of a text may merge with what is free behind it, and
    is held less likely.
    """

    name = "grammar"
    on_host = True
    shares = (0.0, 0.3, 0.7, 0.95)
    reliability = (0.0, 0.6, 0.8, 1.0)

    def attach(self, text: Text) -> None:
        self.text, self.state, self.sampler, batch = text, text.state, text.sampler, len(text.state.tokens)
        tokenizer, vocabulary = text.tokenizer, None
        if tokenizer is not None:
            with suppress(TypeError, ValueError):  # one for stop strings alone, or of bytes that are not known
                vocabulary = Vocabulary.of(tokenizer, "tokenizer")
        if vocabulary is None:
            tokenizer, vocabulary = None, vocabulary_in(text.processors)
        self.taken = self.state.out_len.tolist()
        self.walks: list[Walk | None] = [None] * batch
        if vocabulary is None:
            return
        self.vocabulary, size = vocabulary, text.target.vocab_size
        self.speller, self.cuts = Speller(tokenizer, vocabulary), tokenizer is not None
        behind = max(0, size - len(vocabulary.first_bytes))
        self.first = np.pad(vocabulary.first_bytes[:size], (0, behind), constant_values=NO_TEXT)  # [V]
        self.walks = walks_of(text.processors, batch, vocabulary, size) or self.walks
        tails = [self.state.tokens[b, max(0, end - CONTEXT_TOKENS) : end].tolist() for b, end in enumerate(self.taken)]
        self.before = [self._spelled(tail) for tail in tails]

    def end(self) -> None:
        self.walks = []

    def _spelled(self, tokens: Sequence[int]) -> bytes:
        """Bytes of the last tokens that are text."""
        spelled = b""
        for token in reversed(tokens):
            if token not in self.vocabulary.spelled:
                break
            spelled = self.vocabulary.spelled[token] + spelled
        return spelled

    def _follow(self) -> None:
        """Let the walks follow what was emitted; one whose grammar is another than the text's ends."""
        lengths, done = self.state.out_len.tolist(), self.state.done.tolist()
        begin = min(self.taken)
        rows = self.state.tokens[:, begin : max(lengths)].tolist()
        for b, (row, at, end) in enumerate(zip(rows, self.taken, lengths, strict=True)):
            walk, new = self.walks[b], row[at - begin : end - begin]
            if walk is None or done[b] or end < at or not all(walk.token(token) for token in new):
                self.walks[b] = None
                continue
            self.before[b] = (self.before[b] + self._spelled(new))[-256:]
        self.taken = lengths

    def propose(self, level: Level) -> Proposal | None:
        """Propose what may follow each frontier node by the grammar; how likely the best of it is says the index."""
        if level.number == 0:
            self._follow()
            self.places: list[dict[int, Trie]] = [{} for _ in self.walks]
            self.left = [EXPANDED_NODES] * len(self.walks)
        if not any(walk is not None for walk in self.walks):
            return None
        nodes, tokens = level.frontier.node_ids.tolist(), level.frontier.token_ids.tolist()
        parents = level.graph.parents.tolist() if level.number else None
        texts = []
        for b, walk in enumerate(self.walks):
            places, after = self.places[b], []
            for node, token in zip(nodes[b], tokens[b], strict=True):
                if walk is not None and node >= 0:
                    if parents is None:
                        places[node] = self._ahead(b, walk, self.before[b], begins=True)
                    else:
                        self._place(b, walk, level, node, token, parents[b])
                after.append(places[node].best() if node in places else [])
            texts.append(after)
        if not any(after for row in texts for after in row):
            return None
        return self._proposal(texts, level)

    def _place(self, b: int, walk: Walk, level: Level, node: int, token: int, parents: Sequence[int]) -> None:
        """Find the place of a node: behind its parent's, or by walking to it where another source's token ends so."""
        places, parent = self.places[b], parents[node]
        if parent in places and token in places[parent].after:
            places[node] = places[parent].after[token]
            return
        last = self.vocabulary.spelled.get(token, b"")[-1:]
        if not self.left[b] or not last or last not in MARKS:
            return
        self.left[b] -= 1
        path, all_tokens = [node], level.graph.token_ids[b]
        while parents[path[-1]] > 0:
            path.append(parents[path[-1]])
        steps, behind = 0, [int(all_tokens[n]) for n in reversed(path)]
        for one in behind:
            if not walk.token(one):
                break
            steps += 1
        if steps == len(behind):
            places[node] = self._ahead(b, walk, self.before[b] + self._spelled(behind), begins=False)
        walk.back(steps)

    def _ahead(self, b: int, walk: Walk, before: bytes, *, begins: bool) -> Trie:
        """The tokens of all texts that may follow ``before``."""
        trie, texts = Trie(), list(self._texts(walk, before, b"", [], begins=begins))
        if not texts:
            return trie
        jobs = [(before[-CUT_BYTES:], one.text) for one in texts]
        cut = self.speller.spell(jobs) if self.cuts else [self.speller.longest(one.text) for one in texts]
        keys: dict[tuple[bytes, int], int] = {}  # of a beginning and the way it is cut
        for one, spelled in zip(texts, cut, strict=True):
            longest = self.speller.longest(one.text)
            ways = [spelled] if spelled.tokens == longest.tokens else [spelled, longest]
            for second, way in enumerate(ways):
                if max(way.tokens, default=0) >= len(self.first):  # of a tokenizer with more tokens than the target
                    continue
                share = 1.0 if len(ways) == 1 else (1 - P_SECOND, P_SECOND)[second]
                path, probs = [], {}
                for token, end in zip(way.tokens, way.ends, strict=True):
                    key = keys.setdefault((one.text[:end], second), len(keys))
                    merges = end == len(one.text) and not one.ends
                    probs[key] = math.exp(one.log_probs[end - 1]) * share * (P_LAST if merges else 1.0)
                    path.append((token, key))
                whole = not one.text or way.ends[-1:] == [len(one.text)]
                for token in one.ends if whole else ():
                    key = keys.setdefault((one.text + b"\xff%d" % token, second), len(keys))
                    prob = math.exp(one.end) * share / len(one.ends)
                    trie.add([*path, (token, key)], {**probs, key: prob})
                if path and not (one.ends and whole):
                    trie.add(path, probs)
        return trie

    def _texts(
        self, walk: Walk, before: bytes, text: bytes, log_probs: list[float], *, begins: bool
    ) -> Iterator[Ahead]:
        """The texts that may follow ``before + text``, where the walk is, as far as known; the walk comes back."""
        steps, gone = 0, log_probs[-1] if log_probs else 0.0
        while len(text) < LOOKAHEAD_BYTES and (forced := walk.forced()) and (took := walk.text(forced)):
            steps, text, log_probs = steps + took, text + forced, log_probs + [gone] * len(forced)
        options, ends, spaces = self._options(walk) if len(text) < LOOKAHEAD_BYTES else ([], [], False)
        ways = len(options) + bool(ends)
        ending = ways > MAX_CHOICES and begins and not text  # a free value, which may end here
        if ending:
            options, ends, chance = [byte for byte in ENDS if byte in options], [], P_END
        elif ways > MAX_CHOICES:  # what follows is the model's to say
            options, ends, chance = [], [], 0.0
        else:
            chance = 1.0 / max(1, ways)
        any_text = bool(ends)
        if ends:
            yield Ahead(text, log_probs, ends, gone + math.log(chance))
        glue = self._layout(before, text) if spaces else b""
        for byte in options:
            piece = glue + bytes([byte])
            took = walk.text(piece)
            if glue and not took:
                piece = bytes([byte])
                took = walk.text(piece)
            if not took:
                continue
            likely = gone + math.log(chance * (P_LAYOUT if spaces else 1.0))
            known = log_probs + [likely] * len(piece)
            on = list(self._texts(walk, before, text + piece, known, begins=False))
            walk.back(took)
            if ending and all(one.text == piece and not one.ends for one in on):
                continue  # it is a part of the value
            any_text = True
            yield from on
        if not any_text and text:
            yield Ahead(text, log_probs, [])
        walk.back(steps)

    def _layout(self, before: bytes, text: bytes) -> bytes:
        """The space behind the last byte, as the text has it where that was there before."""
        last = (before + text)[-1:]
        if not last or last not in MARKS:
            return b""
        at = before[:-1].rfind(last)
        if at < 0:
            return b" " if last in SPACED else b""
        rest = before[at + 1 :]
        return rest[: len(rest) - len(rest.lstrip(SPACE))]

    def _options(self, walk: Walk) -> tuple[list[int], list[int], bool]:
        """Bytes that may follow, but for space; tokens without text, which end it; whether space may follow."""
        allowed = np.flatnonzero(walk.allowed()[: len(self.first)])
        begun = self.first[allowed]
        there = np.bincount(begun, minlength=NO_TEXT + 1)
        ends = allowed[begun == NO_TEXT].tolist() if there[NO_TEXT] <= MAX_CHOICES else []
        bytes_there = np.flatnonzero(there[:NO_TEXT]).tolist()
        return [byte for byte in bytes_there if byte not in SPACE], ends, len(set(bytes_there) & set(SPACE)) > 0

    def _proposal(self, likely: list[list[list[tuple[float, int]]]], level: Level) -> Proposal:
        """Log-probabilities and tokens [B][W][any number], the best of them first."""
        kinds = [
            [bisect_right(INDEX_EDGES, math.exp(after[0][0])) + 1 if after else 0 for after in row] for row in likely
        ]
        index = torch.tensor(kinds, dtype=torch.int32, device=self.state.tokens.device)
        return proposal_of(likely, level, self.sampler, index=index)
