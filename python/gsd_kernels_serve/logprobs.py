"""Log-probabilities of emitted tokens, taken from verified steps, and their formats."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gsd_kernels_hf.model.properties import cache_argument, logits_alone
from gsd_kernels_hf.model.sides import longropes_of
from gsd_kernels_hf.model.vocabulary import Vocabulary
from gsd_kernels_hf.records import Verified


@dataclass(frozen=True)
class Entry:
    """A token of a text.

    Attributes:
        token: its id.
        log_prob: of the model itself, before temperature, penalties, bias and grammar; ``None``: not asked for.
        top: the likeliest tokens with theirs, best first.
    """

    token: int
    log_prob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Recorder:
    """Looks at every verified step for what its tokens' log-probabilities are; an ``observer`` of a decoding.

    Args:
        top: number of likeliest tokens a position.
    """

    def __init__(self, top: int) -> None:
        self.top = top
        self.step: list[Entry] = []

    def __call__(self, verified: Verified) -> None:
        rows = verified.accepted.accepted_rows[0].long()  # [P], −1 beyond the path
        rows = rows[rows >= 0].to(verified.logits.device)
        picked = verified.tokens[0, : len(rows)].long()  # [P]
        self.step = entries_of(verified.logits[0, rows], picked, self.top)

    def take(self, token: int) -> Entry:
        """The entry of the next token of the step."""
        entry = self.step.pop(0)
        assert entry.token == token
        return entry


KEPT_TOKENS = 16_384
"""Tokens whose text is kept, the last ones that were told."""

LEAST = -9999.0
"""Of a token that a model rules out, as OpenAI writes it: JSON has no infinity."""

PIECE_TOKENS = 256
"""Tokens of a prompt whose logits are there at once."""


@torch.no_grad()
def of_prompt(model: PreTrainedModel, input_ids: Tensor, top: int, ask: Callable[[], None]) -> list[Entry]:
    """The entries of a prompt [1, P]: of every token but the first, behind those before it.

    Args:
        model: the target.
        input_ids: the prompt.
        top: number of likeliest tokens a position.
        ask: called before every piece.
    """
    entries, kept, alone = [Entry(int(input_ids[0, 0]))], {}, logits_alone(model)
    cache = cache_argument(model)
    most = input_ids.shape[1] if longropes_of(model) else PIECE_TOKENS  # by whose length transformers turns all of it
    for begin in range(0, input_ids.shape[1] - 1, most):
        ask()
        picked = input_ids[0, begin + 1 : begin + 1 + most]  # [n], behind the tokens of this piece
        output = model(input_ids=input_ids[:, begin : begin + len(picked)], use_cache=True, **kept, **alone)
        kept = {cache: getattr(output, cache)}
        entries += entries_of(output.logits[0], picked, top)
    return entries


def entries_of(logits: Tensor, picked: Tensor, top: int) -> list[Entry]:
    """The entries of tokens [n] by the logits [n, V] that they were picked from."""
    log_probs = torch.log_softmax(logits.float(), -1)  # [n, V]
    own = log_probs.gather(1, picked.to(log_probs.device)[:, None])[:, 0].clamp(min=LEAST).tolist()
    best, tokens = log_probs.topk(min(top, log_probs.shape[1]), -1)  # [n, top]
    pairs = zip(tokens.tolist(), best.clamp(min=LEAST).tolist(), strict=True)
    tops = [tuple(zip(*pair, strict=True)) for pair in pairs]
    return [Entry(*one) for one in zip(picked.tolist(), own, tops, strict=True)]


class Pieces:
    """The bytes of a tokenizer's tokens: by themselves, where decoding looks at their neighbours.

    Byte-level tokens, and those with ``▁`` for a space and ``<0x0A>`` for a byte; others are decoded.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.one = lru_cache(KEPT_TOKENS)(self._one)

    @cached_property
    def spelled(self) -> Mapping[int, bytes] | None:
        """The bytes of every token that has any; ``None`` where the tokenizer is of another kind."""
        try:
            known = Vocabulary.of(self.tokenizer, "tokenizer")
        except ValueError:
            return None
        return {**known.spelled, **{token: content.encode() for token, content in known.contents.items()}}

    def chat(self, entries: Iterable[Entry]) -> dict[str, Any]:
        """``logprobs`` of a choice of ``/v1/chat/completions``."""
        rows = []
        for entry in entries:
            own, *top = (
                {**self.one(token), "logprob": log_prob}
                for token, log_prob in ((entry.token, entry.log_prob), *entry.top)
            )
            rows.append({**own, "top_logprobs": top})
        return {"content": rows, "refusal": None}

    def _one(self, token: int) -> dict[str, Any]:
        """A token as a string, ``bytes:\\xe2\\x80`` for part of a character, as OpenAI writes it, and its bytes.

        An id without a token, behind the vocabulary, has none.
        """
        if self.spelled is None:
            data = self.tokenizer.decode([token]).encode()
        else:
            data = self.spelled.get(token, b"")
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return {"token": text, "bytes": list(data)}

    def completion(self, entries: Iterable[Entry], place: Place) -> dict[str, Any]:
        """``logprobs`` of a choice of ``/v1/completions``; ``place``, of the first one, goes on behind them."""
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            own = self.one(entry.token)
            columns["tokens"].append(own["token"])
            columns["token_logprobs"].append(entry.log_prob)
            known = [(entry.token, entry.log_prob), *entry.top]
            tops = {self.one(token)["token"]: log_prob for token, log_prob in known if entry.top}
            columns["top_logprobs"].append(None if entry.log_prob is None else tops)
            columns["text_offset"].append(place.characters)
            place.pass_by(bytes(own["bytes"]))
        return columns


class Place:
    """A place in a text, in characters.

    Args:
        before: what comes before the text.
        shown: the text, where it is known: a prompt. Tokens that are not in it, as the first one of many tokenizers,
            take no place there.
    """

    def __init__(self, before: str = "", shown: str | None = None) -> None:
        self.characters, self.passed = len(before), 0  # passed: bytes
        self.shown = None if shown is None else shown.encode()
        self.decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def pass_by(self, piece: bytes) -> None:
        """Go behind the bytes of a token."""
        if self.shown is not None and not self.shown.startswith(piece, self.passed):
            piece = piece.lstrip() if self.shown.startswith(piece.lstrip(), self.passed) else b""
        self.passed += len(piece)
        self.characters += len(self.decoder.decode(piece))
