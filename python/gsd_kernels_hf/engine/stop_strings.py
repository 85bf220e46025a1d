"""Strings that end a text: transformers' criterion, which reads the tokens of a text in place of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StopStringCriteria


class StopStrings(StopStringCriteria):
    """The decision of transformers' ``StopStringCriteria``, token for token, without its table of the vocabulary.

    The table takes seconds and hundreds of megabytes for a few strings, which the process keeps. Here it is made of a
    text's last tokens alone, and only behind a token that may end a string.

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
        self.pieces: dict[int, tuple[Any, ...]] = {}  # of text, or bytes: that of a token, if it has one
        self.ends: dict[int, bool] = {}  # whether a token may end a string
        super().__init__(_Part(tokenizer, {}), given)  # type: ignore[arg-type]
        self.wanted: tuple[Any, ...] = getattr(self, "_stop_strings_for_matching", self.stop_strings)
        own = [token for string in self.stop_strings for token in tokenizer(string)["input_ids"]]
        if all(self.wanted) and not self._embed(own) and not self._tabulate(*self._cleaned(tokenizer.get_vocab())):
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
        if tail[-1] not in self.ends:
            self.ends[tail[-1]] = self._embed(tail[-1:])
        if not self.ends[tail[-1]]:
            return False
        tokens = list(dict.fromkeys(tail))
        self._embed(tokens)
        rows = torch.tensor([[tokens.index(token) for token in tail]], device="cpu")
        return bool(super().__call__(rows, None))

    def _embed(self, tokens: Sequence[int]) -> bool:
        """Make the table of these tokens, a row each."""
        for token in tokens:
            if token not in self.pieces:
                self.pieces[token] = self._piece(token)
        found = [(piece, row) for row, token in enumerate(tokens) for piece in self.pieces[token]]
        return bool(found) and self._tabulate(*zip(*found, strict=True))

    def _tabulate(self, pieces: Sequence[Any], rows: Sequence[int]) -> bool:
        """Make the table of pieces of text; ``False`` where none of them ends a string."""
        try:
            table = self._stop_string_create_embedding_vec(pieces, rows, self.wanted)
        except ValueError:
            return False
        self.embedding_vec, self.max_valid_positions, self.max_valid_end_lens = table
        return True

    def _piece(self, token: int) -> tuple[Any, ...]:
        try:
            name = self.tokenizer.convert_ids_to_tokens(token)
            known = name is not None and self.tokenizer.convert_tokens_to_ids(name) == token
            return self._cleaned({name: token})[0] if known else ()
        except (IndexError, KeyError, ValueError):  # a row of the logits; or it takes away from the piece before it
            return ()

    def _cleaned(self, vocabulary: dict[str, int]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """The pieces of text that tokens stand for, and the tokens."""
        mode = getattr(self, "_stop_string_matching_mode", None)  # which older releases do not have
        options = {} if mode is None else {"stop_string_matching_mode": mode}
        return self.clean_tokenizer_vocab(_Part(self.tokenizer, vocabulary), **options)  # type: ignore[arg-type]


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
