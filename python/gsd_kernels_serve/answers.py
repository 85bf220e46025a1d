"""How a model's answers are read: transformers' parser, of whose text nothing is lost."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import groupby
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.utils import (
    ResponseParser,
    ToolCall,
    get_response_template,
    response_events_to_chunks,
)

log = logging.getLogger(__name__)

SPACES = 32
"""White space that a delimiter may begin or end with; without a bound a search looks at all of it from each."""

LAST_TOKENS = 8
"""Tokens of a prompt before which there is nothing that a text behind them would be decoded by."""

_CALLS = "tool_calls"

_WHOLE = ("json", "python-call-list")
"""Contents of calls that cannot be read where they are cut."""

_UNBOUNDED = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\(?:s(?P<many>[*+])(?!\+)|.)", re.DOTALL)
"""A class of characters, or an escape; ``many`` of white space."""


class Answer:
    """A text that is being written, in parts: strings, transformers' ``ReasoningText``, ``ToolCall``.

    From a call on that cannot be read, all is text.

    Args:
        parser: transformers', of this text.
        anew: makes another one.
        special: a pattern of special tokens, which a text does not show.
    """

    def __init__(self, parser: Any, anew: Callable[[], Any], special: re.Pattern[str]) -> None:
        self.parser, self.anew, self.special = parser, anew, special
        begun = _read(parser.initial_events)  # by the prompt
        self.begun = [part for part in begun if isinstance(part, ToolCall) or part.strip()]
        self.fed: list[str] = []
        self.untold: list[str] = []  # letters of the text that no part has told yet

    def feed(self, text: str) -> list[Any]:
        """The parts that are clear with more of the text, letter by letter: an error loses what came with its own."""
        if self.parser is None:
            return self._bare(text)
        self.fed.append(text)
        parts: list[Any] = []
        for at, letter in enumerate(text):
            try:
                events = self.parser.feed(letter)
                parts += _read(events)
            except Exception as error:  # of a parser that takes what a model writes for well-formed
                parts += self._give_up(error, text[at:])
                break
            self._note(letter, events)
        return _joined(parts)

    def _note(self, letter: str, events: list[dict[str, Any]]) -> None:
        """Keep the letters that the events of the last one leave untold."""
        self.untold.append(letter)
        clear = [event for event in events if event["type"] == "region_close" or event.get("dirty") is False]
        if {"type": "region_open", "field": _CALLS} in events:  # which closes what is before it
            del self.untold[: sum(len(event.get("text", "")) for event in clear)]
        elif clear:
            self.untold = list(self.parser._buffer[self.parser._pos :])

    def end(self) -> list[Any]:
        """The parts that are clear once the text is over."""
        if self.parser is None:
            return []
        try:
            events = self.parser.finalize()[1]
            if _closes_a_call(events) and self._cut():
                raise ValueError("it is cut")
            return _read(events)
        except Exception as error:  # it ends within a call, say
            return self._give_up(error)

    def _cut(self) -> bool:
        """Return whether the text ends within a call of a kind that is read as far as it goes."""
        field = self.parser._spec.fields[_CALLS]
        if field.close_re is None or field.content in _WHOLE:
            return False
        again = self.anew().feed("".join(self.fed) + "\0")  # behind which a delimiter is clear
        return not _closes_a_call([event for event in again if event["field"] == _CALLS])

    def _give_up(self, error: Exception, rest: str = "") -> list[str]:
        """The letters that no part has told, and the ``rest``, as text."""
        _tell(error)
        self.parser = None
        return self._bare("".join(self.untold) + rest)

    def _bare(self, text: str) -> list[str]:
        return [bare] if (bare := self.special.sub("", text)) else []


class Answers:
    """Readers of a model's answers, one a text.

    Args:
        tokenizer, model: these.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        self._inner, self._model = tokenizer, model
        special = sorted(tokenizer.all_special_tokens, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, special)) or "(?!)")

    @property
    def written(self) -> Mapping[str, Any] | None:
        """How the model writes its answers, as transformers has it; ``None``: unknown, so that calls are text."""
        return get_response_template(self._inner, self._model)

    def parser(self, prompt: list[int], tools: list[dict[str, Any]]) -> ResponseParser | None:
        """transformers', of an answer behind a prompt; ``None``: it is text alone.

        Of a prompt that begins an answer in a way that cannot be read, or in none, it is not told.
        """
        if not self.written:
            return None
        template, before = bounded(self.written), self._inner.decode(prompt)
        bare = ResponseParser(template, prefix="", tools=tools or None)
        if not bare._spec.start_anchor_re.search(before):
            return bare
        try:
            parser = ResponseParser(template, prefix=before, tools=tools or None)
            _read(parser.initial_events)
        except Exception as error:
            _tell(error)
            return bare
        return parser

    def begin(self, prompt: list[int], tools: list[dict[str, Any]]) -> Answer | None:
        """The reading of an answer behind a prompt."""
        parser = self.parser(prompt, tools)
        return None if parser is None else Answer(parser, partial(self.parser, prompt, tools), self.special)


def last_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """The last tokens of a prompt, none where it ends within a character."""
    last = ids[-LAST_TOKENS:]
    return [] if tokenizer.decode(last, skip_special_tokens=True).endswith("\ufffd") else last


def text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int], before: list[int], *, bare: bool = True) -> str:
    """The text of tokens behind others: by themselves those of SentencePiece lose their first space.

    Args:
        tokenizer: of theirs.
        ids: the tokens.
        before: the last ones before them, or none.
        bare: whether special tokens are left out.
    """
    begin = tokenizer.decode(before, skip_special_tokens=bare)
    whole = tokenizer.decode([*before, *ids], skip_special_tokens=bare)
    return whole[len(begin) :] if whole.startswith(begin) else tokenizer.decode(ids, skip_special_tokens=bare)


def bounded(written: Any) -> Any:
    """A template, or a pattern of one, whose searches look at a run of white space once."""
    if isinstance(written, Mapping):
        return {
            key: bounded(value) if isinstance(value, Mapping) or key.endswith("pattern") else value
            for key, value in written.items()
        }
    whole = written.replace(r"\s*(?P<value>", r"\s*+(?P<value>")  # nothing behind it gains by less
    return _UNBOUNDED.sub(
        lambda found: found[0] if found["many"] is None else rf"\s{{{int(found['many'] == '+')},{SPACES}}}", whole
    )


def _read(events: list[dict[str, Any]]) -> list[Any]:
    return _checked(response_events_to_chunks(events))


def _closes_a_call(events: list[dict[str, Any]]) -> bool:
    """Return whether the last of the events does."""
    return bool(events) and (events[-1]["type"], events[-1]["field"]) == ("region_close", _CALLS)


def _checked(parts: list[Any]) -> list[Any]:
    """The parts as they are.

    Raises:
        ValueError: a call whose name is no string, or which holds half a surrogate pair.
    """
    for part in parts:
        if isinstance(part, ToolCall):
            if not isinstance(part.name, str):
                raise ValueError(f"a call of {part.name!r}")
            (part.name + part.arguments).encode()
    return parts


def _joined(parts: Iterable[Any]) -> list[Any]:
    """Neighbours of one kind are one part; every call is one."""
    found: list[Any] = []
    for kind, members in groupby(parts, type):
        same = list(members)
        found += same if kind is ToolCall else [kind("".join(same))]
    return found


def _tell(error: Exception) -> None:
    log.warning("a call cannot be read, and is text: %.200s", " ".join(str(error).split()) or type(error).__name__)
