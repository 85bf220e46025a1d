"""Values that no check had thought of: each is refused by the place where it is, or honoured; none ends in a 500."""

from __future__ import annotations

import json

import pytest
from served import PROMPT, TOOLS

from gsd_kernels_serve.fields import CHAT, COMPLETIONS, RESPONSES

pytestmark = pytest.mark.slow

CALLED = {"id": "1", "type": "function", "function": {"name": "paint", "arguments": "{}"}}
NAMED = {"type": "function", "function": {"name": ["paint"]}}


def called(arguments: str) -> dict[str, object]:
    return {**CALLED, "function": {"name": "paint", "arguments": arguments}}


def nested(levels: int) -> dict[str, object]:
    inner: dict[str, object] = {}
    for _ in range(levels):
        inner = {"type": "object", "properties": {"a": inner}}
    return inner


def schema(given: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "one", "schema": given}}


def calls(given: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": PROMPT}, {"role": "assistant", "tool_calls": given}]


DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    ("endpoint", "named", "place"),
    [
        (COMPLETIONS, {"logit_bias": {"5": None}}, "logit_bias.5"),
        (COMPLETIONS, {"logit_bias": {"05": 1}}, "logit_bias"),  # which may be beside 5
        (COMPLETIONS, {"logit_bias": {"\u0663": 1}}, "logit_bias"),
        (COMPLETIONS, {"generation_config": '{"repetition_penalty": NaN}'}, "generation_config"),
        (COMPLETIONS, {"generation_config": '{"forced_eos_token_id": 99999}'}, "generation_config.forced_eos_token_id"),
        (CHAT, {"tools": TOOLS * 2}, "tools[1].function.name"),
        (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": None}}, "tool_choice.function"),
        (CHAT, {"tools": TOOLS, "tool_choice": NAMED}, "tool_choice.function.name"),
        (CHAT, {"messages": calls(5)}, "messages[1].tool_calls"),
        (CHAT, {"messages": calls([{**CALLED, "type": "custom"}])}, "messages[1].tool_calls[0].type"),
        (CHAT, {"messages": calls([{**CALLED, "cached": 1}])}, "messages[1].tool_calls[0].cached"),
        (CHAT, {"messages": [{"role": "user", "content": "", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        (
            CHAT,
            {"messages": calls([called(f'{{"a": {DEEP[4900:5100]}}}')])},
            "messages[1].tool_calls[0].function.arguments",
        ),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "x", "parameters": nested(200)}}]}, "tools"),
        (RESPONSES, {"tools": [{"type": "function", "name": "x", "parameters": nested(200)}]}, "tools"),
        (CHAT, {"response_format": schema({"not": {}})}, "response_format.json_schema.schema.not"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format.schema.not"),
    ],
    ids=lambda value: json.dumps(value)[-40:],
)
def test_the_place_is_named(endpoint, named, place, server):
    assert server.refusal(endpoint, **named)["param"] == place


def test_a_schema_that_allows_all_or_nothing_is_no_plain_text(server):
    pytest.importorskip("xgrammar")
    for free in ({}, True):
        text = server.text(CHAT, response_format=schema(free), max_tokens=24)
        assert text != server.text(CHAT, max_tokens=24) and text.lstrip()[0] in '{["-0123456789tfn'
    assert server.refusal(CHAT, response_format=schema(False))["param"].startswith("response_format")


def test_a_json_object_may_have_entries(server):
    """xgrammar's strict mode knows ``{}`` alone."""
    pytest.importorskip("xgrammar")
    quote = server.tokenizer('"', add_special_tokens=False)["input_ids"][0]
    text = server.text(CHAT, response_format={"type": "json_object"}, logit_bias={str(quote): 100})
    assert text.startswith('{"')


def test_errors_of_the_body_are_told_as_all_others(server):
    for body in (b'{"prompt":' + b"[" * 100_000 + b"}", b"\xff"):
        status, found = server.raw(COMPLETIONS, body)
        assert status == 400 and found["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", [5, ["small"], {"a": 1}, True, None, ...])
def test_a_model_to_load_is_named_by_a_string(name, server):
    status, found = server.raw("/load_model", {} if name is ... else {"model": name})
    assert status == 400 and found["error"]["param"] == "model"
