"""A JSON schema holds whole or is refused by name: xgrammar drops keywords without a word."""

from __future__ import annotations

import json
import random
import re

import pytest

from gsd_kernels_serve.checks import Refused
from gsd_kernels_serve.processors import Grammars
from gsd_kernels_serve.schemas import check_schema, moved
from gsd_kernels_serve.tools import call_schema

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
