"""Strings that end a text: transformers' criterion, which reads the tokens of a text in place of the vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StopStringCriteria


class _Fit(NamedTuple):
    """Where a token fits into the strings, counted from their ends; in bytes where the criterion compares bytes.

    Attributes:
        length: of the token.
        inside: by string the places where the token may stand before what ends the string.
        ends: by string how much of its end the token may hold, as the last one.
    """

    length: int
    inside: dict[Any, list[int]]
    ends: dict[Any, list[int]]


_NOWHERE = _Fit(0, {}, {})  # such as a row of the logits that is no token


class StopStrings(StopStringCriteria):
    """The decision of transformers' ``StopStringCriteria``, token for token, without its table of the vocabulary.

    The table takes seconds and hundreds of megabytes for a few strings, which the process keeps. Here transformers'
    own functions are asked about a token once a text has it.

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
        self.tokenizer, self.known = tokenizer, dict[int, _Fit]()
        super().__init__(_Part(tokenizer, {}), given)  # type: ignore[arg-type]
        self.wanted: tuple[Any, ...] = getattr(self, "_stop_strings_for_matching", self.stop_strings)
        self._check()

    def clean_and_embed_tokens_with_cache(self, *_: Any) -> tuple[None, int, int]:
        """The table, which is none."""
        return None, 0, 0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Say of every text, [B, L], whether a string has just ended it: bool [B]."""
        rows = input_ids[:, -self.maximum_token_len :].tolist()
        ended = [any(self._ended(row, string) for string in self.wanted) for row in rows]
        return torch.tensor(ended, device=input_ids.device, dtype=torch.bool)

    def _ended(self, row: list[int], string: Any) -> bool:
        if not string:
            return True
        for found in self._fit(row[-1]).ends.get(string, ()):
            before = iter(row[-2::-1])
            while found < len(string) and (token := next(before, None)) is not None:
                fit = self._fit(token)
                if found not in fit.inside.get(string, ()):
                    break
                found += fit.length
            if found >= len(string):
                return True
        return False

    def _fit(self, token: int) -> _Fit:
        if token not in self.known:
            name = self._name(token)
            try:
                pieces, ids = self._cleaned({} if name is None else {name: token})
            except ValueError:  # it takes something away from the piece before it
                pieces, ids = (), ()
            self.known[token] = self._fits(pieces, ids).get(token, _NOWHERE)
        return self.known[token]

    def _name(self, token: int) -> str | None:
        try:
            name = self.tokenizer.convert_ids_to_tokens(token)
        except (IndexError, KeyError):
            return None
        return name if name is not None and self.tokenizer.convert_tokens_to_ids(name) == token else None

    def _cleaned(self, vocabulary: dict[str, int]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """The pieces of text that tokens stand for, and the tokens."""
        mode = getattr(self, "_stop_string_matching_mode", None)  # which older releases do not have
        options = {} if mode is None else {"stop_string_matching_mode": mode}
        part: Any = _Part(self.tokenizer, vocabulary)
        return self.clean_tokenizer_vocab(part, **options)

    def _fits(self, pieces: tuple[Any, ...], ids: tuple[int, ...]) -> dict[int, _Fit]:
        found = self._stop_string_get_matching_positions(pieces, ids, self.wanted)
        inside, ends = ({string: by[string] for string in self.wanted} for by in found)
        return {
            token: _Fit(
                len(piece),
                {string: by[token] for string, by in inside.items() if token in by},
                {string: by[token] for string, by in ends.items() if token in by},
            )
            for piece, token in zip(pieces, ids, strict=True)
        }

    def _check(self) -> None:
        """Refuse strings that no token can end, as transformers does; it has looked at the vocabulary by then."""
        own = (token for string in self.stop_strings for token in self.tokenizer(string)["input_ids"])
        if not all(self.wanted) or any(self._fit(token).ends for token in own):
            return
        pieces, ids = self._cleaned(self.tokenizer.get_vocab())
        near = [(p, i) for p, i in zip(pieces, ids, strict=True) if any(string[-1:] in p for string in self.wanted)]
        if not any(fit.ends for fit in self._fits(tuple(p for p, _ in near), tuple(i for _, i in near)).values()):
            raise ValueError(
                f"stop_strings: no token of this tokenizer ends one of {', '.join(map(repr, self.stop_strings))}"
            )


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
