"""What is refused: requests, and the place that the answer names. None ends in a 500, a stream has its status too."""

from __future__ import annotations

import json

import pytest
from served import LENGTH, PROMPT, SCHEMA, TOOL, TOOLS, row_id, spoken

from gsd_kernels_serve import fields
from gsd_kernels_serve.fields import BOTH, CHAT, COMPLETIONS, ENDPOINTS, RESPONSES, TEMPLATED

pytestmark = pytest.mark.slow

CALLED = {"id": "1", "type": "function", "function": {"name": "paint", "arguments": "{}"}}
FUNCTION = {"type": "function", "function": TOOL}
DEEP = "[" * 100 + "]" * 100


def nested(levels: int) -> dict[str, object]:
    inner: dict[str, object] = {}
    for _ in range(levels):
        inner = {"type": "object", "properties": {"a": inner}}
    return inner


def schema(given: object, **more: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "one", "schema": given, **more}}


def said(**message: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": PROMPT}, {"role": "assistant", **message}]


def user(content: object, **more: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content, **more}]


def chosen(name: object) -> dict[str, object]:
    return {"type": "function", "function": name}


def config(**named: object) -> str:
    return json.dumps(named)


NO_LENGTH = (0, 2**31, 2.5, True)
VALUES = {  # of a field: endpoints, and values for which the field itself is named
    "temperature": (ENDPOINTS, 3, "hot", True, 10**400),
    "top_p": (ENDPOINTS, 1.5),
    "top_k": (ENDPOINTS, -2),
    "min_p": (ENDPOINTS, -1),
    "seed": (ENDPOINTS, 2**80, 1.5),
    "stream": (ENDPOINTS, "yes"),
    "repetition_penalty": (ENDPOINTS, 0),
    "generation_config": (ENDPOINTS, "{", '{"repetition_penalty": NaN}'),
    "frequency_penalty": (BOTH, 2.5),
    "presence_penalty": (BOTH, 2.5),
    "logit_bias": (BOTH, {"x": 1}, {"1000000": 1}, {"05": 1}, {"\u0663": 1}, [1]),
    "max_tokens": (BOTH, *NO_LENGTH),
    "max_completion_tokens": ((CHAT,), *NO_LENGTH),
    "max_output_tokens": ((RESPONSES,), *NO_LENGTH),
    "stop": (BOTH, "", [""], 7, [7], ["x"] * 17),
    "n": (BOTH, 0),
    "best_of": ((COMPLETIONS,), 2),
    "logprobs": (BOTH, "yes"),
    "top_logprobs": (TEMPLATED, 2),  # alone
    "include": ((RESPONSES,), ["reasoning.encrypted_content"]),
    "stream_options": (BOTH, {"include_usage": True}),  # of no stream
    "messages": ((CHAT,), []),
    "prompt": ((COMPLETIONS,), [], [[1, "x"]], [10**6], {"a": 1}, [[]], True),
    "tool_choice": (TEMPLATED, "required"),  # without tools
}
PLACES = [  # an endpoint, fields, and the place that is named
    *((COMPLETIONS, {"logit_bias": {"5": bad}}, "logit_bias.5") for bad in (None, 101, "1")),
    (COMPLETIONS, {"prompt": [PROMPT, 3]}, "prompt[1]"),
    *((COMPLETIONS, {"generation_config": config(**{bad: 3})}, f"generation_config.{bad}")
      for bad in ("num_beams", "num_assistant_tokens", "unheard_of", "num_return_sequences")),
    (COMPLETIONS, {"generation_config": config(forced_eos_token_id=99999)}, "generation_config.forced_eos_token_id"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    *((endpoint, {"chat_template_kwargs": {bad: "sweet"}}, f"chat_template_kwargs.{bad}")
      for endpoint in TEMPLATED for bad in ("taste", "messages", "tools", "tokenize")),  # unread, or the server's own
    # ---- messages and items
    (CHAT, {"messages": user([{"type": "image_url", "image_url": {"url": "data:,"}}])}, "messages[0].content[0]"),
    (CHAT, {"messages": user(7)}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "judge", "content": ""}]}, "messages[0].role"),
    (CHAT, {"messages": user("", tool_call_id="1")}, "messages[0].tool_call_id"),
    (CHAT, {"messages": user(PROMPT, audio={"id": "1"})}, "messages[0].audio"),
    (CHAT, {"messages": user(PROMPT, name="ann")}, "messages[0].name"),  # which the template does not show
    (CHAT, {"messages": said(tool_calls=5)}, "messages[1].tool_calls"),
    (CHAT, {"messages": said(tool_calls=[{**CALLED, "type": "custom"}])}, "messages[1].tool_calls[0].type"),
    (CHAT, {"messages": said(tool_calls=[{**CALLED, "cached": 1}])}, "messages[1].tool_calls[0].cached"),
    (CHAT, {"messages": said(tool_calls=[chosen({"name": "paint", "arguments": f'{{"a": {DEEP}}}'})])},
     "messages[1].tool_calls[0].function.arguments"),
    (RESPONSES, {"input": user([{"type": "input_image", "image_url": "data:,"}])}, "input[0].content[0]"),
    *((RESPONSES, {"input": [{"type": kind, "id": "1"}]}, "input[0].type") for kind in ("item_reference", ["message"])),
    (RESPONSES, {"input": user(PROMPT, name="ann")}, "input[0].name"),
    (CHAT, {"prediction": {"type": "file", "content": "x"}}, "prediction.type"),
    *((CHAT, {"prediction": {"type": "content", "content": [part]}}, "prediction.content[0].text")
      for part in ({"type": "text"}, {"type": "text", "text": 5})),
    # ---- tools
    *((endpoint, {"tools": [{"type": "web_search"}]}, "tools[0].type") for endpoint in TEMPLATED),
    (CHAT, {"tools": TOOLS * 2}, "tools[1].function.name"),
    (CHAT, {"tools": [{**FUNCTION, "cached": 1}]}, "tools[0].cached"),
    (CHAT, {"tools": [chosen({**TOOL, "strict": "yes"})]}, "tools[0].function.strict"),
    (CHAT, {"tools": [chosen({"name": "x", "parameters": nested(200)})]}, "tools"),
    (RESPONSES, {"tools": [{"type": "function", "name": "x", "parameters": nested(200)}]}, "tools"),
    (CHAT, {"tools": TOOLS, "tool_choice": chosen({"name": "sing"})}, "tool_choice"),
    (CHAT, {"tools": TOOLS, "tool_choice": chosen(None)}, "tool_choice.function"),
    (CHAT, {"tools": TOOLS, "tool_choice": chosen({"name": ["paint"]})}, "tool_choice.function.name"),
    # ---- forms
    (CHAT, {"response_format": {"type": "yaml"}}, "response_format.type"),
    (CHAT, {"response_format": {"type": "json_object"}, "tools": TOOLS}, "response_format"),
    (CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
    (CHAT, {"response_format": schema(SCHEMA, description=5)}, "response_format.json_schema.description"),
    (CHAT, {"response_format": schema({"not": {}})}, "response_format.json_schema.schema.not"),
    (RESPONSES, {"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    (RESPONSES, {"text": {"format": {"type": "json_object", "schema": SCHEMA}}}, "text.format.schema"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format.schema.not"),
]  # fmt: skip


@pytest.mark.parametrize(("endpoint", "name"), [(e, name) for name in VALUES for e in VALUES[name][0]], ids=row_id)
def test_a_value_out_of_bounds_is_refused_by_its_field(endpoint, name, server):
    for value in VALUES[name][1:]:
        assert server.refusal(endpoint, **{name: value})["param"] == name, value


@pytest.mark.parametrize(("endpoint", "named", "place"), PLACES, ids=[f"{i}-{row[2]}" for i, row in enumerate(PLACES)])
def test_the_place_is_named(endpoint, named, place, server):
    assert server.refusal(endpoint, **named)["param"] == place


def test_the_form_that_is_nonsense_is_named(server):
    pytest.importorskip("xgrammar")
    for given in (False, {"type": "nonsense"}):
        assert server.refusal(CHAT, response_format=schema(given))["param"].startswith("response_format")


@pytest.mark.parametrize("endpoint", fields.ENDPOINTS, ids=row_id)
def test_a_stream_is_refused_with_a_status_as_well(endpoint, server):
    assert server.refusal(endpoint, stream=True, top_p=7)["param"] == "top_p"
    long = {"prompt": [5] * 2048} if endpoint == COMPLETIONS else {fields.NEEDED[endpoint]: spoken(server, 2048)}
    assert server.refusal(endpoint, stream=True, **{LENGTH[endpoint]: ..., **long})["param"] == fields.NEEDED[endpoint]
    refused = server.refusal(endpoint, stream=True, generation_config='{"bad_words_ids": 5}')
    assert refused["param"].startswith("generation_config")


def test_a_schema_that_allows_all_is_no_plain_text(server):
    pytest.importorskip("xgrammar")
    for free in ({}, True):
        text = server.text(CHAT, response_format=schema(free), max_tokens=24)
        assert text != server.text(CHAT, max_tokens=24) and text.lstrip()[0] in '{["-0123456789tfn'


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
