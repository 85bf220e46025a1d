"""Messages and tools of a request, as chat templates take them; what a template would drop is refused by name."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from . import checks
from .checks import Refused, Size, entries, wrong

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""What a request calls a speaker, and what templates call it."""

_TAKEN = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"}
"""Variables of chat templates, and arguments of the function, that the server sets."""

ARGUMENTS = Size(None, 10_000, 32)
"""Of a call, once they are read out of their string."""

PARTS = ("text", "input_text", "output_text")
_OF_PARTS = ("type", "text", "annotations", "logprobs", "cache_control")
_OF_INPUT = ("role", "content", "type", "id", "status")
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "type", "id", "status")


def messages_of(given: Any, name: str = "messages") -> list[dict[str, Any]]:
    """Messages with plain text, calls with arguments that are objects.

    Raises:
        Refused: of ``name``, with the place.
    """
    if not isinstance(given, list) or not given:
        raise wrong(name, "a list of messages", given)
    return [_message(f"{name}[{i}]", message) for i, message in enumerate(given)]


def _message(name: str, given: Any, keys: tuple[str, ...] = _KEYS) -> dict[str, Any]:
    message = entries(name, given, keys, "role")
    checks.one_of(*ROLES)(f"{name}.role", message["role"])
    turn = {"role": ROLES[message["role"]], "content": _text(f"{name}.content", message.get("content", ""))}
    turn |= {key: message[key] for key in ("name", "tool_call_id", "reasoning_content") if key in message}
    if "tool_call_id" in message and turn["role"] != "tool":
        raise Refused(f"{name}.tool_call_id", "belongs to role tool; leave it out")
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list):
            raise wrong(f"{name}.tool_calls", "a list of calls", message["tool_calls"])
        calls = [_call(f"{name}.tool_calls[{i}]", call) for i, call in enumerate(message["tool_calls"])]
        whole = [call for call in calls if isinstance(call["function"]["arguments"], Mapping)]
        turn |= {"tool_calls": whole} if whole else {}
        cut = [call["function"] for call in calls if call not in whole]  # by max_tokens: they are text
        turn["content"] = "\n".join(filter(None, [turn["content"], *(f"{f['name']}: {f['arguments']}" for f in cut)]))
    elif "content" not in message:
        raise Refused(f"{name}.content", "missing")
    return turn


def _text(name: str, content: Any) -> str:
    """The text of a message's parts, as transformers' server joins them; what clients put beside it is left."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(name, "a string or a list of parts", content)
    texts = []
    for i, part in enumerate(content):
        place = f"{name}[{i}]"
        if not isinstance(part, Mapping) or part.get("type") not in PARTS:
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise Refused(place, f"expected a part of type text, got {kind!r}; this model reads text alone")
        checks.text(f"{place}.text", entries(place, part, _OF_PARTS, "text")["text"])
        texts.append(part["text"])
    return " ".join(texts)


def _call(name: str, given: Any) -> dict[str, Any]:
    call = entries(name, given, ("id", "type", "function", "index"), "function")
    checks.one_of("function")(f"{name}.type", call.get("type", "function"))
    function = entries(f"{name}.function", call["function"], ("name", "arguments"), "name")
    checks.text(f"{name}.function.name", function["name"])
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # which numbers of thousands of digits raise as well
            arguments = json.loads(arguments)
        ARGUMENTS.check(f"{name}.function.arguments", arguments)
    return {**call, "function": {**function, "arguments": arguments}}


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
        _text("input", given)
        return [{"role": "user", "content": given}]
    needed = {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id", "output")}
    for i, item in enumerate(given):
        kind = str(item.get("type", "message"))
        if kind == "message":
            _message(f"input[{i}]", item, _OF_INPUT)
        elif kind in needed:
            known = (*needed[kind], "type", "id", "status")
            fields = entries(f"input[{i}]", item, known, *needed[kind])
            if kind == "function_call":
                _call(f"input[{i}]", {"function": {key: fields[key] for key in ("name", "arguments")}})
        elif kind == "reasoning":
            content = entries(f"input[{i}]", item, ("type", "id", "content", "status")).get("content", [])
            for part in content if isinstance(content, list) else [content]:
                place = f"input[{i}].content"
                checks.text(f"{place}.text", entries(place, part, ("type", "text"), "text")["text"])
        else:
            raise Refused(
                f"input[{i}].type", f"not served: {kind!r}; messages, calls of functions and their results are"
            )
    return given


def template_arguments(body: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Variables for the chat template.

    Raises:
        Refused: the template does not read one, so that it would say nothing.
    """
    values = dict(entries("chat_template_kwargs", given, given)) if (given := body.get("chat_template_kwargs")) else {}
    named = {name: f"chat_template_kwargs.{name}" for name in values}
    if taken := [name for name in values if name in _TAKEN]:
        raise Refused(named[taken[0]], "no variable that is the request's to set; leave it out")
    if "reasoning_effort" in body:
        values["reasoning_effort"], named["reasoning_effort"] = body["reasoning_effort"], "reasoning_effort"
    if effort := body.get("reasoning", {}).get("effort"):
        values["reasoning_effort"], named["reasoning_effort"] = effort, "reasoning.effort"
    for name in values:
        if not reads(tokenizer, name):
            raise Refused(named[name], "this model's chat template does not read it; leave it out")
    return values


def reads(tokenizer: PreTrainedTokenizerBase, variable: str) -> bool:
    """Return whether the chat template names a variable."""
    templates = tokenizer.chat_template or ""
    shown = " ".join(templates.values()) if isinstance(templates, dict) else templates
    return re.search(rf"\b{re.escape(variable)}\b", shown) is not None
