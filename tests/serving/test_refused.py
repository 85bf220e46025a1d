"""What the server refuses, and which schemas it takes."""

from __future__ import annotations

import json
import random
import re

import pytest
from served import LENGTH, PROMPT, SCHEMA, TOOL, TOOLS, row_id, spoken

from gsd_kernels_serve import fields
from gsd_kernels_serve.checks import Refused
from gsd_kernels_serve.fields import BOTH, CHAT, COMPLETIONS, ENDPOINTS, RESPONSES, TEMPLATED
from gsd_kernels_serve.processors import Grammars
from gsd_kernels_serve.schemas import check_schema, moved
from gsd_kernels_serve.tools import call_schema

# What is refused: requests, and the place that the answer names. None ends in a 500, a stream has its status too.


of_refused = pytest.mark.slow

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


@of_refused
@pytest.mark.parametrize(("endpoint", "name"), [(e, name) for name in VALUES for e in VALUES[name][0]], ids=row_id)
def test_a_value_out_of_bounds_is_refused_by_its_field(endpoint, name, server):
    for value in VALUES[name][1:]:
        assert server.refusal(endpoint, **{name: value})["param"] == name, value


@of_refused
@pytest.mark.parametrize(("endpoint", "named", "place"), PLACES, ids=[f"{i}-{row[2]}" for i, row in enumerate(PLACES)])
def test_the_place_is_named(endpoint, named, place, server):
    assert server.refusal(endpoint, **named)["param"] == place


@of_refused
def test_the_form_that_is_nonsense_is_named(server):
    pytest.importorskip("xgrammar")
    for given in (False, {"type": "nonsense"}):
        assert server.refusal(CHAT, response_format=schema(given))["param"].startswith("response_format")


@of_refused
@pytest.mark.parametrize("endpoint", fields.ENDPOINTS, ids=row_id)
def test_a_stream_is_refused_with_a_status_as_well(endpoint, server):
    assert server.refusal(endpoint, stream=True, top_p=7)["param"] == "top_p"
    long = {"prompt": [5] * 2048} if endpoint == COMPLETIONS else {fields.NEEDED[endpoint]: spoken(server, 2048)}
    assert server.refusal(endpoint, stream=True, **{LENGTH[endpoint]: ..., **long})["param"] == fields.NEEDED[endpoint]
    refused = server.refusal(endpoint, stream=True, generation_config='{"bad_words_ids": 5}')
    assert refused["param"].startswith("generation_config")


@of_refused
def test_a_schema_that_allows_all_is_no_plain_text(server):
    pytest.importorskip("xgrammar")
    for free in ({}, True):
        text = server.text(CHAT, response_format=schema(free), max_tokens=24)
        assert text != server.text(CHAT, max_tokens=24) and text.lstrip()[0] in '{["-0123456789tfn'


@of_refused
def test_a_json_object_may_have_entries(server):
    """xgrammar's strict mode knows ``{}`` alone."""
    pytest.importorskip("xgrammar")
    quote = server.tokenizer('"', add_special_tokens=False)["input_ids"][0]
    text = server.text(CHAT, response_format={"type": "json_object"}, logit_bias={str(quote): 100})
    assert text.startswith('{"')


@of_refused
def test_errors_of_the_body_are_told_as_all_others(server):
    for body in (b'{"prompt":' + b"[" * 100_000 + b"}", b"\xff"):
        status, found = server.raw(COMPLETIONS, body)
        assert status == 400 and found["error"]["type"] == "invalid_request_error"


@of_refused
@pytest.mark.parametrize("name", [5, ["small"], {"a": 1}, True, None, ...])
def test_a_model_to_load_is_named_by_a_string(name, server):
    status, found = server.raw("/load_model", {} if name is ... else {"model": name})
    assert status == 400 and found["error"]["param"] == "model"


# A JSON schema holds whole or is refused by name: xgrammar drops keywords without a word.


INT = {"type": "integer"}
TREE = {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}}}, "required": ["c"]}
DEFINED = {"$defs": {"a": INT}}


def an(**bounds):
    return {"type": "object", **bounds}


def a_text(**bounds):
    return {"type": "string", **bounds}


def whole(**bounds):
    return {"type": "integer", **bounds}


def several(**bounds):
    return {"type": "array", **bounds}


UNHELD = ["(?=ab)a", "^(?!a)[ab]+$", "a^b", "a$b", "(^a$)+", "a(b|c$)d", r"\Aab", r"ab\Z", r"\0", r"^\t$"]
UNHELD += ["\t", r"\cA", r"\e", '"', r"\"", r"\\", r"[\t]", '["]', r"\x09", r"\x22", r"\u005c", r"a\b"]
PATTERNS = [
    "a",
    "^a",
    "a$",
    "^a|b$",
    "^(a|b)$",
    "(^a$)|(^b$)",
    "(?:ab)+",
    r'^[^"\\]{2}$',
    r"^\d\D\w\W\s\S$",
    r"\x41|\u0041",
]
PATTERNS += [r"\.\/\-", "a(b$|c$)", "^$", "(?:^ab?)|c"]
HELD = [  # a schema, a value that meets it, one that does not
    (INT, 5, "x"),
    ({"type": ["integer", "null"], "minimum": 3}, 4, 2),
    ({"enum": ["a", 1]}, 1, "b"),
    (a_text(enum=["a"]), "a", "b"),
    (a_text(const="a"), "a", "b"),
    (an(properties={"a": INT}, required=["a"]), {"a": 1}, {}),
    ({"properties": {"a": INT}, "required": ["a"]}, {"a": 1}, {}),
    (an(properties={"a": INT}, additionalProperties=False), {"a": 1}, {"a": 1, "b": 2}),
    (an(properties={"a": INT}), {"a": 1, "b": "open"}, {"a": "x"}),
    (an(additionalProperties=INT), {"b": 2}, {"b": "x"}),
    (an(patternProperties={"^x$": INT}, additionalProperties=False), {"x": 1}, {"y": 1}),
    (an(propertyNames={"pattern": "^a+$", "type": "string"}), {"a": 1}, {"b": 1}),
    (an(minProperties=1), {"a": 1}, {}),
    (an(maxProperties=1), {"a": 1}, {"a": 1, "b": 2}),
    (several(items=INT, minItems=1, maxItems=2), [1], [1, 2, 3]),
    (several(prefixItems=[INT], items=False), [1], [1, 2]),
    (a_text(minLength=2, maxLength=2), "ab", "abc"),
    (a_text(pattern="^a+$"), "aa", "b"),
    (a_text(format="date"), "2024-01-01", "x"),
    (whole(minimum=3, maximum=5), 4, 2),
    ({"type": "number", "exclusiveMinimum": 3}, 3.5, 3),
    (whole(multipleOf=7), 14, 8),
    ({"type": ["integer", "null"], "multipleOf": 7}, None, 8),
    ({"anyOf": [INT, {"type": "null"}], "description": "x"}, 1, "x"),
    ({"allOf": [INT]}, 1, "x"),
    ({**DEFINED, "$ref": "#/$defs/a"}, 1, "x"),
    (TREE, {"c": [{"c": []}]}, {"c": [1]}),
    ({"items": INT, "maxItems": 1}, [1], [1, 2]),
    ({"additionalProperties": INT, "minProperties": 1}, {"a": 1}, {}),
]

DROPPED = [  # a schema, the keyword by which it is refused
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    (several(contains=INT), "contains"),
    (an(unevaluatedProperties=False), "unevaluatedProperties"),
    (an(dependentRequired={"a": ["b"]}), "dependentRequired"),
    (an(required=["z"]), "required"),
    (an(properties={"b": INT}, propertyNames={"type": "string", "pattern": "a"}), "propertyNames"),
    ({"not": INT}, "not"),
    ({"if": INT, "then": INT}, "if"),
    ({"oneOf": [INT, {"type": "number"}]}, "oneOf"),
    ({"allOf": [INT, {"type": "integer", "maximum": 3}]}, "allOf"),
    ({"allOf": [INT], "type": "integer"}, "type"),
    (an(properties={"a": INT}, anyOf=[INT]), "type"),
    ({**DEFINED, "$ref": "#/$defs/a", "minimum": 3}, "minimum"),
    *(({keyword: 1}, keyword) for keyword in ("minItems", "maxItems", "minProperties", "maxProperties")),
    *(({keyword: {}}, keyword) for keyword in ("patternProperties", "propertyNames")),
    ({"items": INT, "maxProperties": 1}, "maxProperties"),
    ({"type": []}, "type"),
    (an(properties={"x": INT}, patternProperties={"x": whole(maximum=3)}), "patternProperties"),
    (an(patternProperties={"^a+$": INT, "^ab?$": {"type": "string"}}), "patternProperties"),
    (an(patternProperties={"(?=b)a": INT}), "patternProperties"),
    *((a_text(pattern=pattern), "pattern") for pattern in UNHELD),
    ({"$ref": "#k"}, "$ref"),
    ({"$ref": "other.json"}, "$ref"),
    (a_text(enum=["a", 1]), "type"),
    (whole(const=True), "type"),
    ({"minimum": 3}, "minimum"),
    (a_text(minimum=3), "minimum"),
    ({"minLength": 3}, "minLength"),
    (a_text(pattern="a", maxLength=2), "maxLength"),
    (a_text(format="date", maxLength=2), "maxLength"),
    (a_text(format="iri"), "format"),
    *(({"type": kind, "multipleOf": 7}, "multipleOf") for kind in ("number", ["integer", "number"])),
    (whole(multipleOf=0.5), "multipleOf"),
    (whole(multipleOf=7, minimum=3), "multipleOf"),
    (whole(multipleOf=7, exclusiveMaximum=30), "multipleOf"),
    (a_text(contentEncoding="base64"), "contentEncoding"),
    # ---- what makes a grammar large
    *(({"enum": [str(i) for i in range(count)]}, "enum") for count in (1_001, 50_000)),
    (a_text(maxLength=10**9), "maxLength"),
    (whole(multipleOf=10**6), "multipleOf"),
    *((a_text(pattern=pattern), "pattern") for pattern in ("^([a-z]{1,30}[0-9]){1,30}$", "a{99999999999}")),
    (an(patternProperties={"a{301}": {}}), "patternProperties"),
]


@pytest.fixture(scope="module")
def library():
    """Whether a grammar of single characters takes a value, and the grammars."""
    xgrammar = pytest.importorskip("xgrammar")
    letters = xgrammar.TokenizerInfo(["<s>", *map(chr, range(1, 128))], stop_token_ids=[0])
    grammars = Grammars(None, 128)
    grammars.compilers[(0,)] = xgrammar.GrammarCompiler(letters)

    def found(schema, value, raw="") -> bool:
        matcher = xgrammar.GrammarMatcher(grammars.of(schema, "schema", [0]), terminate_without_stop_token=True)
        return matcher.accept_string(raw or json.dumps(value)) and matcher.is_completed()

    return found, grammars


@pytest.fixture(scope="module")
def accepts(library):
    return library[0]


@pytest.fixture(scope="module")
def walked(library):
    """A text that is drawn from what the grammar allows."""
    import xgrammar

    def text(schema, draws) -> str:
        matcher = xgrammar.GrammarMatcher(library[1].of(schema, "schema", [0]))
        mask, found = xgrammar.allocate_token_bitmask(1, 128), ""
        while True:
            matcher.fill_next_token_bitmask(mask)
            allowed = [letter for letter in range(128) if mask[0, letter // 32] >> letter % 32 & 1]
            letter = 0 if 0 in allowed else draws.choice(allowed)
            assert matcher.accept_token(letter)
            if letter == 0:
                return found
            found += chr(letter)

    return text


@pytest.mark.parametrize(("schema", "good", "bad"), HELD, ids=lambda value: json.dumps(value)[:40])
def test_what_is_served_holds(schema, good, bad, accepts):
    check_schema(schema, "schema")
    assert accepts(schema, good) and not accepts(schema, bad)
    inner = an(properties={"default": schema if "$" not in json.dumps(schema) else INT}, required=["default"])
    check_schema(inner, "schema")


@pytest.mark.parametrize("letter", ["\0", "\t", "\n", "\x1f"])
@pytest.mark.parametrize("bounds", [{}, {"minLength": 1}, {"maxLength": 9}, {"pattern": "^.+$"}], ids=str)
def test_a_string_holds_no_letter_that_json_escapes(letter, bounds, accepts):
    assert accepts(a_text(**bounds), "a~") and not accepts(a_text(**bounds), None, f'"a{letter}"')


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_that_a_grammar_writes_meet_their_pattern(pattern, walked):
    schema = a_text(pattern=pattern)
    check_schema(schema, "schema")
    texts = [json.loads(walked(schema, random.Random(seed))) for seed in range(9)]
    assert all(re.search(pattern, text) for text in texts), texts


@pytest.mark.parametrize(("schema", "keyword"), DROPPED, ids=lambda value: json.dumps(value)[:40])
def test_what_would_be_dropped_is_refused_by_its_place(schema, keyword):
    for wrap, place in (
        (schema, ""),
        (several(items=schema), ".items"),
        (an(properties={"a": schema}), ".properties.a"),
    ):
        with pytest.raises(Refused) as refused:
            check_schema(wrap, "schema")
        assert refused.value.field == f"schema{place}.{keyword}"


def test_nonsense_is_refused():
    deep: dict = {}
    for _ in range(5000):
        deep = {"type": "array", "items": deep}
    for bad in (deep, 5, {"properties": 5}, {"anyOf": {}}, {"items": [INT]}, {"type": "object", "required": "a"}):
        with pytest.raises(Refused, match=r"^schema"):
            check_schema(bad, "schema")


@pytest.mark.parametrize("more", [[], [("draw", DEFINED | an(properties={"default": {"$ref": "#/$defs/a"}}))]])
def test_references_of_a_function_stay_its_own(more, accepts):
    tools = [{"function": {"name": name, "parameters": schema}} for name, schema in [("grow", TREE), *more]]
    schema = call_schema(tools, "")
    grown = {"name": "grow", "arguments": {"c": [{"c": []}]}}
    assert accepts(schema, grown) and not accepts(schema, {**grown, "arguments": {"c": [grown]}})
    if more:
        assert accepts(schema, {"name": "draw", "arguments": {"default": 1}})
        assert not accepts(schema, {"name": "draw", "arguments": {"default": "x"}})
    assert moved(True, "#/x") is True
