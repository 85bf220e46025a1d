"""Messages and tools of a request, as chat templates take them; what a template would drop is refused by name."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictStr
from transformers import PreTrainedTokenizerBase

from gsd_kernels_cli.pair import BAD_CHAT

from .checks import Object, Refused, Size, one_of, one_or_more, reader, wrong

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""What a request calls a speaker, and what templates call it."""

_TAKEN = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"}
"""Variables of chat templates, and arguments of the function, that the server sets."""

ARGUMENTS = Size(None, 10_000, 32)
"""Of a call, once they are read out of their string."""

PARTS = ("text", "input_text", "output_text")


def _parts(given: Any) -> Any:
    """A text as its only part."""
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


def _arguments(given: Any) -> Any:
    """The arguments of a call, read out of their string; those that were cut by ``max_tokens`` stay text."""
    if isinstance(given, str):
        with contextlib.suppress(ValueError, RecursionError):  # which numbers of thousands of digits raise as well
            given = json.loads(given)
        ARGUMENTS.check("", given)
    return given or {}


class Told(Object):
    """An object with what clients put beside its fields."""

    type: Any = None
    id: Any = None
    index: Any = None
    status: Any = None


class Part(Told):
    """A part of a message."""

    type: one_of(*PARTS)
    text: StrictStr
    annotations: Any = None
    logprobs: Any = None
    cache_control: Any = None


Content = Annotated[list[Part], BeforeValidator(_parts)]


class Called(Object):
    """A function that is called, and with what."""

    name: StrictStr
    arguments: Annotated[Any, BeforeValidator(_arguments)] = None


class Call(Told):
    """A call of a message."""

    function: Called
    type: one_of("function") = "function"


class Item(Told):
    """A message among the items of ``input``."""

    role: one_of(*ROLES)
    content: Content


class Message(Item):
    """A message."""

    content: Content | None = None
    name: Any = None
    tool_calls: list[Call] | None = None
    tool_call_id: Any = None
    reasoning_content: Any = None


class CallItem(Told):
    """A call among the items."""

    call_id: Any
    name: StrictStr
    arguments: Annotated[Any, BeforeValidator(_arguments)]


class OutputItem(Told):
    """The output of a call."""

    call_id: Any
    output: Any


class Thought(Told):
    """A part of reasoning."""

    text: StrictStr


class ReasoningItem(Told):
    """Reasoning among the items."""

    content: one_or_more(Thought) | None = None


_ITEMS = {
    "message": reader(Item),
    "function_call": reader(CallItem),
    "function_call_output": reader(OutputItem),
    "reasoning": reader(ReasoningItem),
}
_messages = reader(Annotated[list[Message], Field(min_length=1)])
_content = reader(Content)
_variables = reader(dict[str, Any])


def messages_of(given: Any, name: str = "messages") -> list[dict[str, Any]]:
    """Messages with plain text, calls with arguments that are objects.

    Raises:
        Refused: of ``name``, with the place.
    """
    return [_turn(f"{name}[{i}]", message) for i, message in enumerate(_messages(name, given))]


def _turn(name: str, message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates take it; its texts are joined as transformers' server does."""
    text = " ".join(part["text"] for part in message.get("content", ()))
    turn = {"role": ROLES[message["role"]], "content": text}
    turn |= {key: message[key] for key in ("name", "tool_call_id", "reasoning_content") if key in message}
    if "tool_call_id" in message and turn["role"] != "tool":
        raise Refused(f"{name}.tool_call_id", "belongs to role tool; leave it out")
    if calls := message.get("tool_calls"):
        whole = [call for call in calls if isinstance(call["function"].setdefault("arguments", {}), Mapping)]
        turn |= {"tool_calls": whole} if whole else {}
        cut = [call["function"] for call in calls if call not in whole]  # by max_tokens: they are text
        turn["content"] = "\n".join(filter(None, [text, *(f"{f['name']}: {f['arguments']}" for f in cut)]))
    elif "content" not in message:
        raise Refused(f"{name}.content", "missing")
    return turn


def items_of(given: Any) -> list[Any]:
    """The items of ``input`` of ``/v1/responses``, of which transformers' server makes messages.

    Raises:
        Refused: another item, or a part that is no text.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or not all(isinstance(item, Mapping) for item in given):
        raise wrong("input", "a string or a list of items", given)
    if "role" not in given[0] and given[0].get("type") in PARTS:
        _content("input", given)
        return [{"role": "user", "content": given}]
    for i, item in enumerate(given):
        kind = str(item.get("type", "message"))
        if kind not in _ITEMS:
            raise Refused(f"input[{i}].type", f"not served: {kind!r}; expected {', '.join(_ITEMS)}")
        _ITEMS[kind](f"input[{i}]", item)
    return given


def template_arguments(body: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Variables for the chat template.

    Raises:
        Refused: the template does not read one, so that it would say nothing.
    """
    kwargs = _variables("chat_template_kwargs", body.get("chat_template_kwargs") or {})
    given = [(f"chat_template_kwargs.{name}", name, value) for name, value in kwargs.items() if value is not None]
    if taken := [place for place, name, _ in given if name in _TAKEN]:
        raise Refused(taken[0], "no variable that is the request's to set; leave it out")
    given.append(("reasoning_effort", "reasoning_effort", body.get("reasoning_effort")))
    given.append(("reasoning.effort", "reasoning_effort", body.get("reasoning", {}).get("effort") or None))
    values = {}
    for place, name, value in given:
        if value is not None:
            if not reads(tokenizer, name):
                raise Refused(place, "this model's chat template does not read it; leave it out")
            values[name] = value
    return values


def reads(tokenizer: PreTrainedTokenizerBase, variable: str) -> bool:
    """Return whether the chat template names a variable."""
    templates = tokenizer.chat_template or ""
    shown = " ".join(templates.values()) if isinstance(templates, dict) else templates
    return re.search(rf"\b{re.escape(variable)}\b", shown) is not None


def check_shown(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], field: str) -> None:
    """Refuse what the chat template leaves out: names of speakers, calls. It is rendered once, however many there are.

    Raises:
        Refused: of ``field``, with the place.
    """
    places = [
        (i, key)
        for i, message in enumerate(messages)
        for key in ("tool_calls", "name")
        if message.get(key) and (message["role"], key) != ("tool", "name")
    ]
    if not places:
        return
    marked = deepcopy(messages)
    for i, key in places:
        named = marked[i] if key == "name" else marked[i][key][0]["function"]
        named["name"] = f"x{i}x{key}x"
    written, whole = _rendered(tokenizer, marked), _rendered(tokenizer, messages)
    for i, key in places:
        if f"x{i}x{key}x" in written:
            continue
        without = {name: value for name, value in messages[i].items() if name != key}
        if _rendered(tokenizer, [*messages[:i], without, *messages[i + 1 :]]) == whole:
            raise Refused(f"{field}[{i}].{key}", "this model's chat template does not show it; leave it out")


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> Any:
    """The text that the template writes; the messages themselves where it does not take them."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False)
    except BAD_CHAT:
        return messages
