"""Functions that a request offers, and the one that it forces: a call is then JSON by a grammar, whatever the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import ToolCall

from . import checks
from .checks import Refused, entries, wrong
from .messages import reads
from .schemas import check_schema, moved


def chosen(body: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[list[dict[str, Any]], str | None]:
    """The functions to show, and the one to call: its name, ``""`` for any of them, ``None`` for no forced call.

    Args:
        body: a checked request of either endpoint.
        tokenizer: whose template has to show them.

    Raises:
        Refused: of ``tools``, ``tool_choice`` or ``parallel_tool_calls``.
    """
    choice = body.get("tool_choice", "auto")
    if choice == "none":
        return [], None
    forced = choice != "auto"
    tools = tools_of(body.get("tools", []), tokenizer, forced=forced)
    if not forced:
        if tools and body.get("parallel_tool_calls") is False:
            raise Refused("parallel_tool_calls", "how many calls a text has is the model's to say; leave it out")
        return tools, None
    name = "" if choice == "required" else _named(choice)
    names = [tool["function"]["name"] for tool in tools]
    if not tools or (name and name not in names):
        raise Refused("tool_choice", f"tools has no {name or 'function'}; it has {', '.join(names) or 'none'}")
    return tools, name


def _named(choice: Any) -> str:
    """The function of ``{"type": "function", "function": {"name": …}}``, or of that with the name beside its type."""
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind != "function":
        raise Refused("tool_choice", f"expected none, auto, required or a named function, got {kind!r}")
    if "function" in choice:
        choice = entries("tool_choice", choice, ("type", "function"), "function")["function"]
        name, place = entries("tool_choice.function", choice, ("name",), "name")["name"], "tool_choice.function.name"
    else:
        name, place = entries("tool_choice", choice, ("type", "name"), "name")["name"], "tool_choice.name"
    checks.text(place, name)
    return name


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
        if "function" in tool:
            inner = entries(name, tool, ("type", "function"), "function")["function"]
        else:
            inner = {key: value for key, value in tool.items() if key != "type"}
        function = entries(f"{name}.function", inner, ("name", "description", "parameters", "strict"), "name")
        checks.text(f"{name}.function.name", function["name"])
        checks.an_object(f"{name}.function.parameters", function.get("parameters", {}))
        if function.pop("strict", False) and not forced:
            raise Refused(f"{name}.function.strict", 'not held to where tool_choice is "auto"; leave it out')
        if forced:
            check_schema(function.get("parameters", {}), f"{name}.function.parameters")
        if any(function["name"] == other["function"]["name"] for other in tools):
            raise Refused(f"{name}.function.name", f"{function['name']!r} is the name of another as well")
        tools.append({"type": "function", "function": function})
    if tools and not reads(tokenizer, "tools"):
        raise Refused("tools", "this model's chat template does not show them; leave them out")
    return tools


def call_schema(tools: list[dict[str, Any]], forced: str) -> dict[str, Any]:
    """The JSON that a forced call is: the arguments of a named function, or one of all with its name."""
    free = {"type": "object"}
    known = {tool["function"]["name"]: tool["function"].get("parameters") or free for tool in tools}
    if forced:
        return known[forced]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{i}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, name in enumerate(known)
    ]
    schemas = {str(i): moved(schema, f"#/$defs/{i}") for i, schema in enumerate(known.values())}
    return {"$defs": schemas, **(calls[0] if len(calls) == 1 else {"anyOf": calls})}


def forced_calls(content: str, forced: str) -> list[ToolCall]:
    """The call that a text is; of a text that was cut before it named its function, none."""
    if forced:
        return [ToolCall(forced, content)]
    try:
        found = json.loads(content)
    except json.JSONDecodeError:
        return []
    return [ToolCall(found["name"], json.dumps(found["arguments"]))]
