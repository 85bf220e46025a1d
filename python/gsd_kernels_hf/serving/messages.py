"""Messages and tools of a request, as chat templates take them; what a template would drop is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from . import checks
from .checks import Refused, entries, wrong

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""What a request calls a speaker, and what templates call it."""

PARTS = ("text", "input_text", "output_text")
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "type", "id", "status")


def messages_of(given: Any, name: str = "messages") -> list[dict[str, Any]]:
    """Messages with plain text, calls with arguments that are objects.

    Raises:
        Refused: of ``name``, with the place.
    """
    if not isinstance(given, list) or not given:
        raise wrong(name, "a list of messages", given)
    return [_message(f"{name}[{i}]", message) for i, message in enumerate(given)]


def _message(name: str, given: Any) -> dict[str, Any]:
    message = entries(name, given, _KEYS, "role")
    checks.one_of(*ROLES)(f"{name}.role", message["role"])
    found = {"role": ROLES[message["role"]], "content": _text(f"{name}.content", message.get("content", ""))}
    found |= {key: message[key] for key in ("name", "tool_call_id", "reasoning_content") if key in message}
    if message.get("tool_calls"):
        found["tool_calls"] = [_call(f"{name}.tool_calls[{i}]", call) for i, call in enumerate(message["tool_calls"])]
    elif "content" not in message:
        raise Refused(f"{name}.content", "missing")
    return found


def _text(name: str, content: Any) -> str:
    """The text of a message's parts, as transformers' server joins them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(name, "a string or a list of parts", content)
    found = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") not in PARTS:
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise Refused(f"{name}[{i}]", f"expected a part of type text, got {kind!r}; this model reads text alone")
        checks.text(f"{name}[{i}].text", part.get("text"))
        found.append(part["text"])
    return " ".join(found)


def _call(name: str, given: Any) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise wrong(name, "a call of a function", given)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise Refused(f"{name}.function.arguments", f"no JSON: {error}") from error
    return {**given, "function": {**function, "arguments": arguments}}


def check_input(given: Any) -> None:
    """Check ``input`` of ``/v1/responses``: what transformers' server makes messages of.

    Raises:
        Refused: another item, or a part that is no text.
    """
    if isinstance(given, str):
        return
    if not isinstance(given, list) or not given or not all(isinstance(item, Mapping) for item in given):
        raise wrong("input", "a string or a list of items", given)
    if "role" not in given[0] and given[0].get("type") in PARTS:
        _text("input", given)
        return
    needed = {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id", "output")}
    for i, item in enumerate(given):
        kind = item.get("type", "message")
        if kind == "message":
            _message(f"input[{i}]", item)
        elif kind in needed:
            known = (*needed[kind], "type", "id", "status")
            found = entries(f"input[{i}]", item, known, *needed[kind])
            if kind == "function_call":
                _call(f"input[{i}]", {"function": found})
        elif kind != "reasoning":
            raise Refused(
                f"input[{i}].type", f"not served: {kind!r}; messages, calls of functions and their results are"
            )


def tools_of(given: Any, tokenizer: PreTrainedTokenizerBase, *, forced: bool = False) -> list[dict[str, Any]]:
    """Functions as templates take them; none for an empty list.

    Args:
        given: ``tools``, of either endpoint.
        tokenizer: whose template has to show them.
        forced: whether a grammar holds the call to its schema, as ``strict`` asks.

    Raises:
        Refused: of ``tools``.
    """
    if not isinstance(given, list):
        raise wrong("tools", "a list of functions", given)
    tools = []
    for i, tool in enumerate(given):
        name = f"tools[{i}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, Mapping) else tool
            raise Refused(f"{name}.type", f"not served: {kind!r}; only 'function' is")
        inner = tool.get("function") or {key: value for key, value in tool.items() if key != "type"}
        function = entries(f"{name}.function", inner, ("name", "description", "parameters", "strict"), "name")
        checks.text(f"{name}.function.name", function["name"])
        if function.pop("strict", False) and not forced:
            raise Refused(f"{name}.function.strict", 'not held to where tool_choice is "auto"; leave it out')
        tools.append({"type": "function", "function": function})
    if tools and not reads(tokenizer, "tools"):
        raise Refused("tools", "this model's chat template does not show them; leave them out")
    return tools


def template_arguments(body: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Variables for the chat template.

    Raises:
        Refused: the template does not read one, so that it would say nothing.
    """
    found = dict(entries("chat_template_kwargs", given, given)) if (given := body.get("chat_template_kwargs")) else {}
    named = {name: f"chat_template_kwargs.{name}" for name in found}
    if "reasoning_effort" in body:
        found["reasoning_effort"], named["reasoning_effort"] = body["reasoning_effort"], "reasoning_effort"
    if effort := body.get("reasoning", {}).get("effort"):
        found["reasoning_effort"], named["reasoning_effort"] = effort, "reasoning.effort"
    for name in found:
        if not reads(tokenizer, name):
            raise Refused(named[name], "this model's chat template does not read it; leave it out")
    return found


def reads(tokenizer: PreTrainedTokenizerBase, variable: str) -> bool:
    """Whether the chat template names a variable."""
    templates = tokenizer.chat_template or ""
    shown = " ".join(templates.values()) if isinstance(templates, dict) else templates
    return re.search(rf"\b{re.escape(variable)}\b", shown) is not None
