"""How a model's answers are read: transformers' parser, of whose text nothing is lost."""

from __future__ import annotations

import logging
import re
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.utils import ToolCall, get_response_template, response_events_to_chunks
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from .checks import Json, one_line

log = logging.getLogger(__name__)

SPACES = 32
"""White space that a delimiter may begin or end with; without a bound a search looks at all of it from each."""

_CALLS = "tool_calls"

_WHOLE = ("json", "python-call-list")
"""Contents of calls that cannot be read where they are cut."""

_UNBOUNDED = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\(?:s(?P<many>[*+])(?!\+)|.)", re.DOTALL)
"""A class of characters, or an escape; ``many`` of white space."""


class Answer(ResponseParser):
    """A text that is being written, in parts: strings, transformers' ``ReasoningText``, ``ToolCall``.

    From a call on that cannot be read, all is text.

    Args:
        template: how the model writes its answers.
        prefix: the prompt, or ``""``.
        tools: that the request offers.
        special: a pattern of special tokens, which a text does not show.

    Attributes:
        begun: the parts that the prompt has begun.
        is_text: whether a call could not be read.
        at: where the text begins that no part has told, once it is text: with that call.
    """

    def __init__(self, template: Any, prefix: str, tools: list[Json], special: re.Pattern[str]) -> None:
        self.special, self.is_text = special, False
        super().__init__(template, prefix=prefix, tools=tools or None)
        self.at = len(self._buffer)  # what a prompt has begun is no part of the text
        self.begun = [
            part
            for part in response_events_to_chunks(self.initial_events)
            if isinstance(part, ToolCall) or part.strip()
        ]

    def parts(self, text: str = "", over: bool = False) -> list[Any]:
        """The parts that are clear with more of the text, or with its end."""
        self._buffer += text
        events: list[Json] = []
        if not self.is_text:
            self._process(events, over)
        parts = response_events_to_chunks(events)
        if self.is_text:
            bare = self.special.sub("", self._buffer[self.at :])
            self.at = len(self._buffer)
            parts += [bare] if bare else []
        return parts

    def _process(self, events: list[Json], eos: bool) -> None:
        self.clear = 0  # events that are before the region that is open
        try:
            super()._process(events, eos)
        except Exception as error:  # of a parser that takes what a model writes for well-formed
            log.warning("a call cannot be read, and is text: %.200s", one_line(error))
            self.is_text = True
            del events[self.clear :]

    def _open_explicit(self, events: list[Json], field: Any, m: Any) -> None:
        self.at, self.inner, self.clear = m.start(), m.end(), len(events)  # inner: what is within
        super()._open_explicit(events, field, m)

    def _close_current(self, events: list[Json]) -> None:
        """Close a region, and check the call that it is.

        Raises:
            ValueError: the text ends within it, its name is no string, or it holds half a surrogate pair.
        """
        calls, field = self._current == _CALLS, self._spec.fields.get(_CALLS)
        marked = calls and field.close_re is not None and field.content not in _WHOLE
        if marked and not field.close_re.search(self._buffer, self.inner):
            raise ValueError("it is cut")
        super()._close_current(events)
        for part in response_events_to_chunks(events[-1:]) if calls else ():
            if not isinstance(part.name, str):
                raise ValueError(f"a call of {part.name!r}")
            (part.name + part.arguments).encode()


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
    def written(self) -> Json | None:
        """How the model writes its answers, as transformers has it; ``None``: unknown, so that calls are text."""
        return get_response_template(self._inner, self._model)

    def begin(self, prompt: list[int], tools: list[Json]) -> Answer | None:
        """The reading of an answer behind a prompt; ``None``: it is text alone.

        Of a prompt that begins an answer in a way that cannot be read, or in none, it is not told.
        """
        if not self.written:
            return None
        template, before = load_response_template(bounded(self.written)), self._inner.decode(prompt)
        answer = Answer(template, before if template.start_anchor_re.search(before) else "", tools, self.special)
        return Answer(template, "", tools, self.special) if answer.is_text else answer


def bounded(written: Any) -> Any:
    """A template, or a pattern of one, whose searches look at a run of white space once."""
    if isinstance(written, dict):
        return {
            key: bounded(value) if isinstance(value, dict) or key.endswith("pattern") else value
            for key, value in written.items()
        }
    whole = written.replace(r"\s*(?P<value>", r"\s*+(?P<value>")  # nothing behind it gains by less
    return _UNBOUNDED.sub(
        lambda found: found[0] if found["many"] is None else rf"\s{{{int(found['many'] == '+')},{SPACES}}}", whole
    )
