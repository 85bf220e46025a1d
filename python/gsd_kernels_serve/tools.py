"""Functions that a request offers, and the one that it forces: a call is then JSON by a grammar, whatever the model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BeforeValidator, StrictBool, StrictStr
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import ToolCall

from .checks import Object, Refused, one_of, reader, wrong
from .messages import reads
from .processors import Marked, schema_of
from .schemas import check_schema, moved

_QWEN_XML = r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>"
"""How transformers knows the calls of Qwen 3.5 and its kind."""

_OPEN = {"type": "object", "additionalProperties": True}
_GAP = {"type": "regex", "pattern": "[ \\n]{0,2}"}


@dataclass
class Offered:
    """The functions of a request.

    Attributes:
        tools: to show, as templates take them.
        forced: the one to call: its name, ``""`` for any of them, ``None`` for no forced call.
        strict: places of those whose arguments are held to their schema, by name.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)
    forced: str | None = None
    strict: dict[str, str] = field(default_factory=dict)


def chosen(body: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Offered:
    """Read the tools that a checked request of either endpoint offers.

    Args:
        body: the request.
        tokenizer: whose template has to show the functions.

    Raises:
        Refused: of ``tools`` or ``tool_choice``.
    """
    choice = body.get("tool_choice", "auto")
    if choice == "none":
        return Offered()
    offered = tools_of(body.get("tools", []), tokenizer)
    if choice == "auto":
        return offered
    if choice != "required" and not isinstance(choice, Mapping):
        raise wrong("tool_choice", "none, auto, required or a named function", choice)
    offered.forced = "" if choice == "required" else _choice("tool_choice", choice)["function"]["name"]
    names = [tool["function"]["name"] for tool in offered.tools]
    if not names or (offered.forced and offered.forced not in names):
        known = ", ".join(names) or "none"
        raise Refused("tool_choice", f"tools has no {offered.forced or 'function'}; it has {known}")
    for i, tool in enumerate(offered.tools):
        check_schema(tool["function"].get("parameters", {}), f"tools[{i}].function.parameters")
    return offered


def held_to(offered: Offered, form: Any, field: str, template: Mapping[str, Any] | None) -> tuple[Any, str] | None:
    """The form that a grammar holds texts to, a schema or :class:`Marked` calls, and the field that asks for it.

    ``None`` where they are free.

    Args:
        offered: the functions.
        form: what ``field`` holds, or ``None``.
        field: ``response_format`` or ``text.format``.
        template: how the model writes its answers, as transformers has it; ``None``: unknown, so that calls are text.

    Raises:
        Refused: it cannot be held.
    """
    if form is not None and (schema := schema_of(form, field)) is not None:
        if offered.tools:
            raise Refused(field, 'tools are not served beside it; leave it out, or tool_choice "none"')
        return schema, field
    if offered.forced is not None:
        return call_schema(offered.tools, offered.forced), "tool_choice"
    if not offered.strict or template is None:
        return None
    return Marked(_marked(offered, template.get("fields", {}).get("tool_calls", {}))), "tools"


def _marked(offered: Offered, written: Mapping[str, Any]) -> dict[str, Any]:
    """xgrammar's structural tag of a text with calls, as a model writes them; those of strict functions are held."""
    functions = [tool["function"] for tool in offered.tools]
    for function in functions:
        if (place := offered.strict.get(function["name"])) is not None:
            check_schema(function.get("parameters", {}), f"{place}.parameters")
    held = [f if f["name"] in offered.strict else {**f, "parameters": _OPEN} for f in functions]
    opening = str(written.get("open") or written.get("open_pattern", ""))
    begins = opening if "open" in written else re.sub(r"^\\s\*", "", opening)
    literal = "open" in written or re.fullmatch(r"[\w<>/ ]+", begins) is not None
    as_json = written.get("content") == "json" and written.get("transform", {}).get("function") == "{content}"
    if opening == _QWEN_XML:
        parts = [_xml(function) for function in held]
        return _tags("<tool_call>", {"type": "or", "elements": parts} if len(parts) > 1 else parts[0], "</tool_call>")
    if as_json and literal and isinstance(written.get("close"), str):
        schema = call_schema([{"function": function} for function in held], "")
        content = {"type": "json_schema", "json_schema": schema}
        return _tags(begins, {"type": "sequence", "elements": [_GAP, content, _GAP]}, written["close"])
    place = next(iter(offered.strict.values()))
    raise Refused(f"{place}.strict", "not held to in calls as this model writes them; leave it out, or force a call")


def _xml(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or _OPEN
    parts = [
        {"type": "const_string", "value": f"<function={function['name']}>"},
        {"type": "json_schema", "json_schema": schema, "style": "qwen_xml"},
        {"type": "const_string", "value": "</function>"},
    ]
    return {"type": "sequence", "elements": [_GAP, parts[0], _GAP, parts[1], _GAP, parts[2], _GAP]}


def _tags(begins: str, content: Any, ends: str) -> dict[str, Any]:
    tag = {"type": "tag", "begin": begins, "content": content, "end": ends}
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": [begins], "tags": [tag]}}


def _nested(given: Any) -> Any:
    """A function, or the choice of one, whose fields may be beside its type."""
    if isinstance(given, Mapping) and given.get("type") == "function" and "function" not in given:
        return {"type": "function", "function": {key: value for key, value in given.items() if key != "type"}}
    return given


class Function(Object):
    """A function that may be called."""

    name: StrictStr
    description: StrictStr = ""
    parameters: dict[str, Any] | None = None
    strict: StrictBool = False


class Tool(Object):
    """A tool of a request."""

    type: one_of("function")
    function: Function


class Named(Object):
    """The name of a function."""

    name: StrictStr


class Choice(Object):
    """The function that is to be called."""

    type: one_of("function")
    function: Named


_tools = reader(list[Annotated[Tool, BeforeValidator(_nested)]])
_choice = reader(Annotated[Choice, BeforeValidator(_nested)])


def tools_of(given: Any, tokenizer: PreTrainedTokenizerBase) -> Offered:
    """Functions as templates take them; none for an empty list.

    Args:
        given: ``tools``, of either endpoint.
        tokenizer: whose template has to show them.

    Raises:
        Refused: of ``tools``.
    """
    offered = Offered()
    for i, tool in enumerate(_tools("tools", given)):
        function, place = tool["function"], f"tools[{i}].function"
        if any(function["name"] == other["function"]["name"] for other in offered.tools):
            raise Refused(f"{place}.name", f"{function['name']!r} is the name of another as well")
        offered.strict |= {function["name"]: place} if function.pop("strict", False) else {}
        offered.tools.append({"type": "function", "function": function})
    if offered.tools and not reads(tokenizer, "tools"):
        raise Refused("tools", "this model's chat template does not show them; leave them out")
    return offered


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
        call = json.loads(content)
    except json.JSONDecodeError:
        return []
    return [ToolCall(call["name"], json.dumps(call["arguments"]))]
