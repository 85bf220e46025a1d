"""Strings that end a text: transformers' criterion, which joins tokens of a text in place of a table of all of them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StopStringCriteria


class StopStrings(StopStringCriteria):
    """The decision of transformers' ``StopStringCriteria``, token for token, without its table of the vocabulary.

    The table takes seconds and hundreds of megabytes for a few strings, which the process keeps. Here the pieces of a
    text's last tokens are joined: a string has just ended it where its end lies in the last one.

    Args:
        tokenizer: of the texts.
        stop_strings: one or several.

    Raises:
        TypeError: they are no strings.
        ValueError: no token of the vocabulary ends one of them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_strings: str | list[str]) -> None:
        given = [stop_strings] if isinstance(stop_strings, str) else stop_strings
        if not isinstance(given, (list, tuple)) or not all(isinstance(string, str) for string in given):
            raise TypeError(f"stop_strings: expected a string or a list of them, got {stop_strings!r}")
        if not given:
            raise ValueError("stop_strings: the list is empty; leave it out")
        self.tokenizer = tokenizer
        self.pieces: dict[int, Any] = {}  # of text, or bytes, by token; None: it has none
        super().__init__(_Part(tokenizer, {}), given)  # type: ignore[arg-type]
        self.wanted: tuple[Any, ...] = getattr(self, "_stop_strings_for_matching", self.stop_strings)
        own = [self._piece(token) for string in self.stop_strings for token in tokenizer(string)["input_ids"]]
        if not self._may_end(own) and not self._may_end(self._cleaned(tokenizer.get_vocab())):
            raise ValueError(
                f"stop_strings: no token of this tokenizer ends one of {', '.join(map(repr, self.stop_strings))}"
            )

    def clean_and_embed_tokens_with_cache(self, *_: Any) -> tuple[None, int, int]:
        """The table, which is none."""
        return None, 0, 0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Say of every text, [B, L], whether a string has just ended it: bool [B]."""
        ended = [self._ended(tail) for tail in input_ids[:, -self.maximum_token_len :].tolist()]
        return torch.tensor(ended, device=input_ids.device, dtype=torch.bool)

    def _ended(self, tail: list[int]) -> bool:
        if not all(self.wanted):  # an empty string ends every text
            return True
        last = self._piece(tail[-1])
        if not last:
            return False
        text = last
        for token in reversed(tail[:-1]):
            if (piece := self._piece(token)) is None:  # no string reaches across it
                break
            text = piece + text
        return any(string in text[max(0, len(text) - len(last) - len(string) + 1) :] for string in self.wanted)

    def _may_end(self, pieces: Iterable[Any]) -> bool:
        """Return whether the end of a string may lie in one of these pieces; that of an empty one lies everywhere."""
        ends = [(string, string[at:]) for string in self.wanted for at in range(len(string))]
        found = any(string in piece or piece.startswith(end) for piece in pieces if piece for string, end in ends)
        return found or not all(self.wanted)

    def _piece(self, token: int) -> Any:
        if token not in self.pieces:
            self.pieces[token] = None
            # A row of the logits is no token; a token may take away from the piece before it.
            with suppress(IndexError, KeyError, ValueError):
                name = self.tokenizer.convert_ids_to_tokens(token)
                if name is not None and self.tokenizer.convert_tokens_to_ids(name) == token:
                    self.pieces[token] = self._cleaned({name: token})[0]
        return self.pieces[token]

    def _cleaned(self, vocabulary: dict[str, int]) -> tuple[Any, ...]:
        """The pieces of text that tokens stand for."""
        mode = getattr(self, "_stop_string_matching_mode", None)  # which older releases do not have
        options = {} if mode is None else {"stop_string_matching_mode": mode}
        return self.clean_tokenizer_vocab(_Part(self.tokenizer, vocabulary), **options)[0]  # type: ignore[arg-type]


class _Part:
    """A tokenizer with a part of its vocabulary."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: dict[str, int]) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer(*args, **kwargs)

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary
