"""Grammars in logits processors, as a draft walks them: copies of a matcher, whatever library it is of."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from ..model.vocabulary import Vocabulary


class XGrammarWalk:
    """Over an ``xgrammar.GrammarMatcher`` of its own, whose vocabulary has ``size`` tokens.

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


class LLGuidanceWalk:
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

    def back(self, steps: int) -> None:
        if steps:
            self.matcher.rollback(steps)

    def forced(self) -> bytes:
        return self.matcher.compute_ff_bytes()

    def allowed(self) -> np.ndarray:
        return np.unpackbits(np.frombuffer(self.matcher.compute_bitmask(), np.uint8), bitorder="little").view(bool)


Walk = XGrammarWalk | LLGuidanceWalk
"""A walk of one's own through a grammar."""


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
        return XGrammarWalk(matcher, size)
    return LLGuidanceWalk(matcher, vocabulary)


def vocabulary_in(processors: Sequence[Any]) -> Vocabulary | None:
    """The tokens that a processor's grammar was compiled for, where it says."""
    for value in _values(processors):
        if isinstance(value, _kinds("CompiledGrammar")):
            info = value.tokenizer_info
            return _read(tuple(info.decoded_vocab), (*info.special_token_ids, *info.stop_token_ids))
    return None


@lru_cache(maxsize=2)
def _read(words: tuple[bytes, ...], special: tuple[int, ...]) -> Vocabulary:
    left_out = set(special)
    return Vocabulary({t: word for t, word in enumerate(words) if word and t not in left_out}, {}, {})


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
        for value in vars(processor).values() if hasattr(processor, "__dict__") else ():
            for one in value if isinstance(value, (list, tuple)) else (value,):
                yield from _values([one]) if isinstance(one, LogitsProcessor) else (one,)


def _copies(processor: Any, batch: int) -> list[Any]:
    """A matcher of one's own for every sequence, ``None`` where a row has none; empty where there are none.

    Grammars come before matchers, which may be of an earlier text; a processor that is used for one text alone has a
    matcher at its beginning.
    """
    values = list(vars(processor).values()) if hasattr(processor, "__dict__") else []
    lists = [[v] if not isinstance(v, (list, tuple)) else list(v) for v in values]
    compiled, matchers = _kinds("CompiledGrammar"), _kinds("GrammarMatcher", "LLMatcher")
    for found in lists:
        if found and compiled and all(isinstance(one, compiled) for one in found) and len(found) in (1, batch):
            return [sys.modules["xgrammar"].GrammarMatcher(one) for one in found * (batch // len(found))]
    tokenizers = [v for v in values if _kinds("LLTokenizer") and isinstance(v, _kinds("LLTokenizer"))]
    grammar = getattr(processor, "grammar", None)
    if tokenizers and isinstance(grammar, str):
        return [sys.modules["llguidance"].LLMatcher(tokenizers[0], grammar) for _ in range(batch)]
    for found in lists:
        if len(found) == batch and matchers and all(isinstance(one, matchers) for one in found):
            return [one.fork() if hasattr(one, "fork") else one.deep_copy() for one in found]
    for found in lists:
        if len(found) == batch and all(isinstance(one, LogitsProcessor) for one in found):
            return [next(iter(_copies(one, 1)), None) for one in found]
    return []
