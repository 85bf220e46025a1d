"""Grammar: a draft source without a forward, from what a call's grammar lets follow.

Grammars in logits processors are walked by copies of a matcher, whatever library it is of.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from ..model.vocabulary import NO_TEXT, Speller, Vocabulary
from .base import DraftSource, Level, Proposal, Text
from .trie import Places, Trie, after_nodes, emitted_since, proposal_of, text_at_end

CONTEXT_TOKENS = 8  # tokens before the root, which decide how what follows is cut
CUT_BYTES = 32  # bytes before a text, behind which it is cut
LOOKAHEAD_BYTES = 96  # bytes that are looked ahead
WALK_CALLS = (
    24  # questions to the matcher in one step of a sequence: a text that is forced in few bytes each costs most
)
MAX_ENDS = (
    4  # tokens without text that are all proposed as ends; with more of them the grammar does not say how it ends
)
SPACE = b" \n\t\r"
MARKS = b'"{}[],:'  # behind which a grammar may know what follows
SPACED = b":,"  # behind which a space is likelier than none, where the text has not shown it
P_LAYOUT, P_LAST, P_SECOND = 0.9, 0.6, 0.15
"""Probabilities: of the guess where space is free; of a token that may merge with free text behind it; of the longest
tokens where the tokenizer has others."""

INDEX_EDGES = (0.3, 0.8)  # between the indices


class Walk:
    """A walk through a grammar, over an ``xgrammar.GrammarMatcher`` of its own, whose vocabulary has ``size`` tokens.

    Every step of a walk can be taken back.
    """

    def __init__(self, matcher: Any, size: int) -> None:
        self.matcher = matcher
        self.mask = torch.zeros(1, -(-size // 32), dtype=torch.int32, device="cpu")

    def token(self, token: int) -> bool:
        """Go on by a token; whether the grammar allows it."""
        return not self.matcher.is_terminated() and bool(self.matcher.accept_token(token))

    def text(self, text: bytes) -> int:
        """Go on by a text; the number of steps that it took, 0 where the grammar does not allow it."""
        return int(self.matcher.accept_string(text))

    def back(self, steps: int) -> None:
        """Take steps back."""
        if steps:
            self.matcher.rollback(steps)

    def forced(self) -> bytes:
        """The text that must follow, as far as the library tells."""
        try:
            return self.matcher.find_jump_forward_string().encode()
        except UnicodeDecodeError:  # it ends within a character
            return b""

    def allowed(self) -> np.ndarray:
        """The tokens that may follow, bool [V or more]."""
        try:
            self.matcher.fill_next_token_bitmask(self.mask)
        except RuntimeError:  # it was compiled for another number of tokens: nothing is known
            self.mask.fill_(-1)
        return np.unpackbits(self.mask.numpy().view(np.uint8)[0], bitorder="little").view(bool)


class LLGuidanceWalk(Walk):
    """A walk like the other, over an ``llguidance.LLMatcher``, which takes tokens alone; ``vocabulary``: theirs."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self.matcher, self.vocabulary = matcher, vocabulary

    def token(self, token: int) -> bool:
        return self._tokens([token]) == 1

    def text(self, text: bytes) -> int:
        return self._tokens([self.vocabulary.ids.get(text[i : i + 1], -1) for i in range(len(text))])

    def _tokens(self, tokens: list[int]) -> int:
        """Go on by all of them or none: what is refused would end the matcher."""
        if self.matcher.is_stopped() or min(tokens) < 0 or self.matcher.validate_tokens(tokens) < len(tokens):
            return 0
        return len(tokens) * int(self.matcher.consume_tokens(tokens))

    def forced(self) -> bytes:
        return self.matcher.compute_ff_bytes()

    def allowed(self) -> np.ndarray:
        return np.unpackbits(np.frombuffer(self.matcher.compute_bitmask(), np.uint8), bitorder="little").view(bool)


def walks_of(processors: Sequence[Any], batch: int, vocabulary: Vocabulary, size: int) -> list[Walk | None]:
    """A walk from where the grammar of each sequence is, of the first processor that has grammars; none otherwise.

    The processors' own matchers are not touched.

    Args:
        processors: logits processors of a call.
        batch: number of sequences.
        vocabulary: of the target.
        size: columns of its logits.
    """
    for processor in processors:
        matchers = _copies(processor, batch)
        if any(matcher is not None for matcher in matchers):
            return [None if matcher is None else _walk(matcher, vocabulary, size) for matcher in matchers]
    return []


def _walk(matcher: Any, vocabulary: Vocabulary, size: int) -> Walk:
    if type(matcher).__module__.startswith("xgrammar"):
        return Walk(matcher, size)
    return LLGuidanceWalk(matcher, vocabulary)


def vocabulary_in(processors: Sequence[Any]) -> Vocabulary | None:
    """The tokens that a processor's grammar was compiled for, where it says."""
    for value in _values(processors):
        if isinstance(value, _kinds("CompiledGrammar")):
            info = value.tokenizer_info
            return _read(tuple(info.decoded_vocab), frozenset((*info.special_token_ids, *info.stop_token_ids)))
    return None


@lru_cache(maxsize=2)
def _read(words: tuple[bytes, ...], special: frozenset[int]) -> Vocabulary:
    return Vocabulary({t: word for t, word in enumerate(words) if word and t not in special}, {}, {})


def holds_grammar(processors: Sequence[Any]) -> bool:
    """Return whether a processor has a grammar of a library that is known here."""
    kinds = _kinds("GrammarMatcher", "CompiledGrammar", "LLMatcher", "LLTokenizer")
    return bool(kinds) and any(isinstance(value, kinds) for value in _values(processors))


def _kinds(*names: str) -> tuple[type, ...]:
    """Classes of libraries that are loaded; a processor's is."""
    loaded = [sys.modules[name] for name in ("xgrammar", "llguidance") if name in sys.modules]
    return tuple(getattr(library, name) for library in loaded for name in names if hasattr(library, name))


def _values(processors: Sequence[Any]) -> Iterator[Any]:
    """The values that the processors hold, and those in lists of theirs."""
    for processor in processors:
        for value in getattr(processor, "__dict__", {}).values():
            for one in value if isinstance(value, (list, tuple)) else (value,):
                yield from _values([one]) if isinstance(one, LogitsProcessor) else (one,)


def _copies(processor: Any, batch: int) -> list[Any]:
    """A matcher of one's own for every sequence, ``None`` where a row has none; empty where there are none.

    Grammars come before matchers, which may be of an earlier text; a processor that is used for one text alone has a
    matcher at its beginning.
    """
    values = getattr(processor, "__dict__", {}).values()
    lists = [list(v) if isinstance(v, (list, tuple)) else [v] for v in values]
    compiled, matchers = _kinds("CompiledGrammar"), _kinds("GrammarMatcher", "LLMatcher")
    for found in lists:
        if len(found) in (1, batch) and all(isinstance(one, compiled) for one in found):
            return [sys.modules["xgrammar"].GrammarMatcher(one) for one in found * (batch // len(found))]
    tokenizers = [v for v in values if isinstance(v, _kinds("LLTokenizer"))]
    grammar = getattr(processor, "grammar", None)
    if tokenizers and isinstance(grammar, str):
        return [sys.modules["llguidance"].LLMatcher(tokenizers[0], grammar) for _ in range(batch)]
    for found in lists:
        if len(found) == batch and all(isinstance(one, matchers) for one in found):
            return [one.fork() if hasattr(one, "fork") else one.deep_copy() for one in found]
    for found in lists:
        if len(found) == batch and all(isinstance(one, LogitsProcessor) for one in found):
            return [next(iter(_copies(one, 1)), None) for one in found]
    return []


class Grammar(DraftSource):
    """A source of the text that the grammar of a call's processors forces, as the tokens that spell it.

    The grammar's state is a copy that follows the text; the processors' own are not touched. From the root, and from
    nodes of other sources behind punctuation, it is walked on as long as one text can follow, and not where it
    branches: several ways at every byte are exponentially many texts. Where space alone is free it is laid out as the
    text has been. A text is cut as the tokenizer does behind what was written, and into the longest tokens: both are in
    the graph. The last token of a text may merge with what is free behind it, and is held less likely.
    """

    name = "grammar"
    on_host = True
    shares = (0.0, 0.3, 0.7, 0.95)
    reliability = (0.0, 0.6, 0.8, 1.0)

    def attach(self, text: Text) -> None:
        self.state, self.sampler, batch = text.state, text.sampler, len(text.state.tokens)
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
        return b"".join(text_at_end(self.vocabulary, tokens))

    def _follow(self) -> None:
        """Let the walks follow what was emitted; one whose grammar is another than the text's ends."""
        done = self.state.done.tolist()
        for b, new in enumerate(emitted_since(self.state, self.taken)):
            walk = self.walks[b]
            if walk is None or done[b] or not all(walk.token(token) for token in new):
                self.walks[b] = None
                continue
            self.before[b] = (self.before[b] + self._spelled(new))[-256:]

    def propose(self, level: Level) -> Proposal | None:
        """Propose what may follow each frontier node by the grammar; how likely the best of it is says the index."""
        if level.number == 0:
            self._follow()
            self.places: Places = [{} for _ in self.walks]
            self.calls = [WALK_CALLS] * len(self.walks)
        if not any(walk is not None for walk in self.walks):
            return None
        self.tokens = level.graph.token_ids
        texts = after_nodes(self.places, level, self._place)
        if not any(after for row in texts for after in row):
            return None
        kinds = [
            [bisect_right(INDEX_EDGES, math.exp(after[0][0])) + 1 if after else 0 for after in row] for row in texts
        ]
        index = level.frontier.node_ids.new_tensor(kinds)
        return proposal_of(texts, level, self.sampler, index=index)

    def _place(self, b: int, node: int, token: int, parents: list[int]) -> Trie | None:
        """Find what follows the root, or a node of another source whose token ends in a mark, by walking to it."""
        walk, path = self.walks[b], [node]
        last = self.vocabulary.spelled.get(token, b"")[-1:]
        if walk is None or (node and (not last or last not in MARKS)):
            return None
        while path[-1] > 0:
            path.append(parents[path[-1]])
        behind = [int(self.tokens[b, n]) for n in reversed(path[:-1])]
        self.calls[b] -= len(behind)
        if behind and self.calls[b] <= 0:
            return None
        steps, place = sum(1 for _ in takewhile(walk.token, behind)), None
        if steps == len(behind):
            place = self._ahead(b, walk, self.before[b] + self._spelled(behind))
        walk.back(steps)
        return place

    def _ahead(self, b: int, walk: Walk, before: bytes) -> Trie:
        """The tokens of the text that must follow ``before``."""
        trie, (text, probs, ends) = Trie(), self._forced(b, walk, before)
        longest = self.speller.longest(text)
        cut = self.speller.spell([(before[-CUT_BYTES:], text)])[0] if self.cuts and text else longest
        ways = [cut] if cut.tokens == longest.tokens else [cut, longest]
        for second, way in enumerate(ways):
            if max(way.tokens, default=0) >= len(self.first):  # of a tokenizer with more tokens than the target
                continue
            share = 1.0 if len(ways) == 1 else (1 - P_SECOND, P_SECOND)[second]
            rows = [2 * end + second for end in way.ends]  # told apart by the way, since their shares are added
            likely = {row: probs[end] * share for row, end in zip(rows, way.ends, strict=True)}
            path, whole = list(zip(way.tokens, rows, strict=True)), way.covered == len(text)
            if path and whole and not ends:
                likely[rows[-1]] *= P_LAST
            trie.add(path, likely)
            for number, token in enumerate(ends if whole else (), start=len(text) + 1):
                row = 2 * number + second
                trie.add([*path, (token, row)], {**likely, row: probs[-1] * share / len(ends)})
        return trie

    def _forced(self, b: int, walk: Walk, before: bytes) -> tuple[bytes, list[float], list[int]]:
        """The text that must follow where the walk is, which comes back.

        Returns:
            The bytes, the probability of each beginning of them, and the tokens that must end the text there; no such
            token where it goes on, freely or beyond what was looked at.
        """
        text, probs, steps, ends = b"", [1.0], 0, []
        while len(text) < LOOKAHEAD_BYTES and self.calls[b] > 0:
            self.calls[b] -= 1
            likely, pieces = probs[-1], [walk.forced()]
            if not pieces[0]:
                options, ends, spaces = self._options(walk)
                if ends or len(options) != 1:  # it ends, or what follows is the model's to say
                    ends = [] if options else ends
                    break
                pieces = [bytes(options)]
                if spaces:
                    likely *= P_LAYOUT
                    pieces.insert(0, self._layout(before + text) + bytes(options))
            took = 0
            for piece in pieces:
                if took := walk.text(piece):
                    break
            if not took:
                break
            steps, text, probs = steps + took, text + piece, probs + [likely] * len(piece)
        walk.back(steps)
        return text, probs, ends

    def _layout(self, before: bytes) -> bytes:
        """The space behind the last byte, as the text has it where that was there before."""
        last = before[-1:]
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
        ends = allowed[begun == NO_TEXT].tolist() if there[NO_TEXT] <= MAX_ENDS else []
        bytes_there = np.flatnonzero(there[:NO_TEXT]).tolist()
        return [byte for byte in bytes_there if byte not in SPACE], ends, len(set(bytes_there) & set(SPACE)) > 0
