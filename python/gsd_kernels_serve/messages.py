"""Messages and tools of a request, as chat templates take them; what a template would drop is refused by name.

A call that is forced, or of a strict function, is JSON by a grammar, whatever the model.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictBool, StrictStr
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import ToolCall

from gsd_kernels_cli.pair import BAD_CHAT

from .checks import Json, Object, Refused, Size, one_of, one_or_more, reader, wrong
from .schemas import Marked, check_schema, moved, schema_of

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


Arguments = Annotated[Any, BeforeValidator(_arguments)]
Content = Annotated[list[Part], BeforeValidator(_parts)]


class Named(Object):
    """The name of a function."""

    name: StrictStr


class Called(Named):
    """A function that is called, and with what."""

    arguments: Arguments = None


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
    arguments: Arguments


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


def messages_of(given: Any, name: str = "messages") -> list[Json]:
    """Messages with plain text, calls with arguments that are objects.

    Raises:
        Refused: of ``name``, with the place.
    """
    turns = []
    for i, message in enumerate(_messages(name, given)):
        text = " ".join(part["text"] for part in message.get("content", ()))  # as transformers' server joins them
        turn = {"role": ROLES[message["role"]], "content": text}
        turn |= {key: message[key] for key in ("name", "tool_call_id", "reasoning_content") if key in message}
        if "tool_call_id" in message and turn["role"] != "tool":
            raise Refused(f"{name}[{i}].tool_call_id", "belongs to role tool; leave it out")
        if calls := message.get("tool_calls"):
            whole = [call for call in calls if isinstance(call["function"].setdefault("arguments", {}), dict)]
            turn |= {"tool_calls": whole} if whole else {}
            cut = [call["function"] for call in calls if call not in whole]  # by max_tokens: they are text
            turn["content"] = "\n".join(filter(None, [text, *(f"{f['name']}: {f['arguments']}" for f in cut)]))
        elif "content" not in message:
            raise Refused(f"{name}[{i}].content", "missing")
        turns.append(turn)
    return turns


def items_of(given: Any) -> list[Any]:
    """The items of ``input`` of ``/v1/responses``, of which transformers' server makes messages.

    Raises:
        Refused: another item, or a part that is no text.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or not all(isinstance(item, dict) for item in given):
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


def template_arguments(body: Json, tokenizer: PreTrainedTokenizerBase) -> Json:
    """Variables for the chat template.

    Raises:
        Refused: the template does not read one, so that it would say nothing.
    """
    kwargs = body.get("chat_template_kwargs", {})
    given = [(f"chat_template_kwargs.{name}", name, value) for name, value in kwargs.items() if value is not None]
    if taken := [place for place, name, _ in given if name in _TAKEN]:
        raise Refused(taken[0], "no variable that is the request's to set; leave it out")
    given += [
        ("reasoning_effort", "reasoning_effort", body.get("reasoning_effort")),
        ("reasoning.effort", "reasoning_effort", body.get("reasoning", {}).get("effort") or None),
    ]
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


def check_shown(tokenizer: PreTrainedTokenizerBase, messages: list[Json], field: str) -> None:
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


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[Json]) -> Any:
    """The text that the template writes; the messages themselves where it does not take them."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False)
    except BAD_CHAT:
        return messages


# ---- tools


_QWEN_XML = r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>"
"""How transformers knows the calls of Qwen 3.5 and its kind."""

_OPEN = {"type": "object", "additionalProperties": True}
_GAP = {"type": "regex", "pattern": "[ \\n]{0,2}"}


@dataclass
class Offered:
    """The functions of a request.

    Attributes:
        functions: to show.
        forced: the one to call: its name, ``""`` for any of them, ``None`` for no forced call.
        strict: places of those whose arguments are held to their schema, by name.
    """

    functions: list[Json] = field(default_factory=list)
    forced: str | None = None
    strict: dict[str, str] = field(default_factory=dict)

    @property
    def tools(self) -> list[Json]:
        """The functions as templates take them."""
        return [{"type": "function", "function": function} for function in self.functions]


def chosen(body: Json, tokenizer: PreTrainedTokenizerBase) -> Offered:
    """Read the tools that a checked request of either endpoint offers.

    Args:
        body: the request.
        tokenizer: whose template has to show the functions.

    Raises:
        Refused: of ``tools`` or ``tool_choice``.
    """
    choice, offered, names = body.get("tool_choice", "auto"), Offered(), []
    if choice == "none":
        return offered
    for i, tool in enumerate(_tools("tools", body.get("tools", []))):
        function, place = tool["function"], f"tools[{i}].function"
        if (name := function["name"]) in names:
            raise Refused(f"{place}.name", f"{name!r} is the name of another as well")
        names.append(name)
        offered.strict |= {name: place} if function.pop("strict", False) else {}
        offered.functions.append(function)
    if names and not reads(tokenizer, "tools"):
        raise Refused("tools", "this model's chat template does not show them; leave them out")
    if choice == "auto":
        return offered
    if choice != "required" and not isinstance(choice, dict):
        raise wrong("tool_choice", "none, auto, required or a named function", choice)
    offered.forced = "" if choice == "required" else _choice("tool_choice", choice)["function"]["name"]
    if not names or (offered.forced and offered.forced not in names):
        raise Refused(
            "tool_choice", f"tools has no {offered.forced or 'function'}; it has {', '.join(names) or 'none'}"
        )
    for i, function in enumerate(offered.functions):
        check_schema(function.get("parameters", {}), f"tools[{i}].function.parameters")
    return offered


def held_to(offered: Offered, form: Any, field: str, template: Json | None) -> tuple[Any, str] | None:
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
        if offered.functions:
            raise Refused(field, 'tools are not served beside it; leave it out, or tool_choice "none"')
        return schema, field
    if offered.forced is not None:
        return call_schema(offered.functions, offered.forced), "tool_choice"
    if not offered.strict or template is None:
        return None
    return Marked(_marked(offered, template.get("fields", {}).get("tool_calls", {}))), "tools"


def _marked(offered: Offered, written: Json) -> Json:
    """xgrammar's structural tag of a text with calls, as a model writes them; those of strict functions are held."""
    held = []
    for function in offered.functions:
        if (place := offered.strict.get(function["name"])) is not None:
            check_schema(function.get("parameters", {}), f"{place}.parameters")
        held.append({**function, "parameters": _OPEN} if place is None else function)
    opening = str(written.get("open") or written.get("open_pattern", ""))
    begins = opening if "open" in written else re.sub(r"^\\s\*", "", opening)
    literal = "open" in written or re.fullmatch(r"[\w<>/ ]+", begins) is not None
    as_json = written.get("content") == "json" and written.get("transform", {}).get("function") == "{content}"
    if opening == _QWEN_XML:
        parts = [_xml(function) for function in held]
        return _tags("<tool_call>", {"type": "or", "elements": parts} if len(parts) > 1 else parts[0], "</tool_call>")
    if as_json and literal and isinstance(written.get("close"), str):
        content = {"type": "json_schema", "json_schema": call_schema(held, "")}
        return _tags(begins, {"type": "sequence", "elements": [_GAP, content, _GAP]}, written["close"])
    place = next(iter(offered.strict.values()))
    raise Refused(f"{place}.strict", "not held to in calls as this model writes them; leave it out, or force a call")


def _xml(function: Json) -> Json:
    begins = {"type": "const_string", "value": f"<function={function['name']}>"}
    schema = {"type": "json_schema", "json_schema": function.get("parameters") or _OPEN, "style": "qwen_xml"}
    ends = {"type": "const_string", "value": "</function>"}
    return {"type": "sequence", "elements": [_GAP, begins, _GAP, schema, _GAP, ends, _GAP]}


def _tags(begins: str, content: Any, ends: str) -> Json:
    tag = {"type": "tag", "begin": begins, "content": content, "end": ends}
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": [begins], "tags": [tag]}}


def _nested(given: Any) -> Any:
    """A function, or the choice of one, whose fields may be beside its type."""
    if isinstance(given, dict) and given.get("type") == "function" and "function" not in given:
        return {"type": "function", "function": {key: value for key, value in given.items() if key != "type"}}
    return given


class Function(Named):
    """A function that may be called."""

    description: StrictStr = ""
    parameters: Json | None = None
    strict: StrictBool = False


class Choice(Object):
    """The function that is to be called."""

    type: one_of("function")
    function: Named


class Tool(Choice):
    """A tool of a request."""

    function: Function


_tools = reader(list[Annotated[Tool, BeforeValidator(_nested)]])
_choice = reader(Annotated[Choice, BeforeValidator(_nested)])


def call_schema(functions: list[Json], forced: str) -> Json:
    """The JSON that a forced call is: the arguments of a named function, or one of all with its name."""
    known = {function["name"]: function.get("parameters") or {"type": "object"} for function in functions}
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
