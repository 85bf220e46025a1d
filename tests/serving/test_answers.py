"""How answers are read, as models of a known kind write them, and the schemas that a text is held to."""

from __future__ import annotations

import json

import pytest
import torch
from served import ASKED, LENGTH, OFFERED, PROMPT, QWEN, SCHEMA, TOOL, TOOLS, read, row_id
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.cli.serving import utils

from gsd_kernels_serve.answers import Answers
from gsd_kernels_serve.calls import Request
from gsd_kernels_serve.checks import Refused
from gsd_kernels_serve.fields import CHAT, COMPLETIONS, RESPONSES, TEMPLATED
from gsd_kernels_serve.logprobs import Pieces
from gsd_kernels_serve.messages import call_schema, chosen, held_to
from gsd_kernels_serve.schemas import Grammars, check_schema

pytestmark = pytest.mark.slow

FALLBACKS = {kind: template for kinds, template in utils._RESPONSE_TEMPLATE_FALLBACKS.items() for kind in kinds}
QWEN_3_5 = {**FALLBACKS["qwen3_5"], "start_anchor": QWEN["start_anchor"]}
THINKS = {"reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"}, **QWEN["fields"]}
THINKING = {**QWEN, "fields": THINKS}
CALL = '<tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=paint>\n<parameter=colour>\nred\n</parameter>\n</function>\n</tool_call>"
PAINT = ("paint", '{"colour": "red"}')
THOUGHT = "<think>hm</think>"
CUT = "\N{ZERO WIDTH SPACE}"
"""Where the length ends a text that goes on."""


@pytest.fixture
def says(server, monkeypatch):
    """Have the model, of a kind whose answers transformers knows, write a text; a function of both."""

    def say(text: str, template=QWEN) -> int:
        monkeypatch.setattr(server.tokenizer, "response_template", template, raising=False)
        ids = [*server.tokenizer(text, add_special_tokens=False)["input_ids"], server.tokenizer.eos_token_id]

        def script(prompt: int):
            def next_token(input_ids, scores):  # [1, n], [1, V]
                return torch.where(torch.arange(scores.shape[1]) == ids[min(input_ids.shape[1] - prompt, len(ids) - 1)],
                                   0.0, -torch.inf)[None]  # fmt: skip

            return [next_token]

        monkeypatch.setattr(Request, "processors", lambda _, prompt: script(prompt))
        return len(ids)

    return say


READ = [  # how a kind of model writes, what it writes, the text that is told of it (None: all of it), thought, calls
    *((QWEN, text, None, "", []) for text in (
        "", "x \u20ac",
        '<tool_call>\n{"name": "paint", "argum' + CUT,
        'So: <tool_call>{"name": "paint"}</tool_call>',
        'So: <tool_call>{"name": 5, "arguments": {}}</tool_call> it is',
        f"<tool_call>x</tool_call> or {CALL}",
        'So: <tool_call>{"name": "paint", "arguments": "\\ud83d"}</tool_call>',
    )),
    (QWEN, f"So: {CALL} and <tool_call>[1]</tool_call>", "So: and <tool_call>[1]</tool_call>", "", [PAINT]),
    (QWEN, f"So: {CALL}\n{CALL}", "So:", "", [PAINT, PAINT]),
    (QWEN, f"Hello {CALL} Bye", "Hello Bye", "", [PAINT]),
    *((QWEN_3_5, f"So: {XML_CALL[:-gone]}{CUT}", None, "", []) for gone in (1, 13, 45, 72)),
    (QWEN_3_5, f"So: {XML_CALL}{CUT}", "So:", "", [PAINT]),
    *(({**THINKING, "start_anchor": anchor}, f"So: {CALL}", "So:", "", [PAINT]) for anchor in ("<|nowhere|>", "def")),
    (THINKING, f"{THOUGHT}{CALL}", "", "hm", [PAINT]),
    (THINKING, f"{THOUGHT}So: {CALL}<think>hm!</think> and {CALL} done", "So: and done", "hmhm!", [PAINT, PAINT]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "endpoint"),
    # what is text alone is read by the same parser for either
    [(row, one) for row in range(len(READ)) for one in (TEMPLATED if READ[row][4] else [TEMPLATED[row % 2]])],
    ids=row_id,
)
def test_an_answer_is_told_by_its_parts_and_text_as_it_was_written(endpoint, row, server, says):
    """A call that cannot be read is text; of a prompt that begins no answer, or one that cannot be read, nothing is."""
    template, text, told, thought, calls = READ[row]
    length = says(text.removesuffix(CUT), template) - text.endswith(CUT)
    asks = {"tools": OFFERED[endpoint], LENGTH[endpoint]: length}
    if template["start_anchor"] != QWEN["start_anchor"]:
        prompt = "Call it: def <tool_call>x</tool_call>, <think>."
        asks |= {"messages": [{"role": "user", "content": prompt}]} if endpoint == CHAT else {"input": prompt}
    expected = " ".join((text.removesuffix(CUT) if told is None else told).split()), thought, calls
    whole, events = server.got(endpoint, **asks), server.got(endpoint, stream=True, **asks)
    for found in (whole, events):
        said = read(found)
        assert (" ".join(said.text.split()), said.thought, said.calls) == expected
        parts = [found] if found is whole else map(json.loads, found)
        choices = [choice.get("delta") or choice.get("message", {}) for p in parts for choice in p.get("choices", ())]
        names = [call["id"] for choice in choices for call in choice.get("tool_calls") or []]
        assert len(names) == len(set(names)) == ((endpoint == CHAT) * len(calls))


def test_the_items_of_a_stream_come_once_each_and_in_their_order(server, says):
    length = says(f"{THOUGHT}So: {CALL}<think>hm!</think> and {CALL} done", THINKING)
    named = {
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "model": "small",
        "input": PROMPT,
        "temperature": 0,
        "tools": OFFERED[RESPONSES],
    }
    with server.client.responses.stream(**named, max_output_tokens=length) as events:
        found = list(events)
        final = events.get_final_response()
    assert [event.sequence_number for event in found] == list(range(len(found)))
    kinds = ["reasoning", "message", "function_call", "reasoning", "message", "function_call", "message"]
    assert [item.type for item in final.output] == kinds
    done = [event.item.id for event in found if event.type == "response.output_item.done"]
    assert done == [item.id for item in final.output] and len(set(done)) == len(kinds)
    for index, item in enumerate(final.output):
        if item.type == "message":
            deltas = [e for e in found if e.type == "response.output_text.delta" and e.output_index == index]
            assert item.content[0].text == "".join(event.delta for event in deltas)
            assert len(item.content[0].logprobs or ()) == sum(len(event.logprobs or ()) for event in deltas)


def test_a_thought_that_a_prompt_begins_goes_on_and_what_a_grammar_holds_is_no_thought(server, says):
    asks = {"messages": [{"role": "user", "content": "x:\n\n<think>\n"}], "max_tokens": says("hm</think>So", THINKING)}
    for found in (server.got(CHAT, **asks), server.got(CHAT, stream=True, **asks)):
        assert read(found)[:3] == ("So", [], "hm")
    call = {"messages": [{"role": "user", "content": "x:\n\n<tool_call>"}], "max_tokens": says('{"na', QWEN)}
    assert server.text(CHAT, **call) == '{"na', "what the prompt has begun is not told"
    pytest.importorskip("xgrammar")
    says('{"colour": "red"}', THINKING)
    form = {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA}}
    said = read(server.got(CHAT, **{**asks, "max_tokens": 64}, response_format=form))
    assert (json.loads(said.text), said.thought) == ({"colour": "red"}, "")
    asks = {"tools": OFFERED[RESPONSES], "tool_choice": {"type": "function", "name": "paint"}, "max_output_tokens": 64}
    events = server.got(RESPONSES, stream=True, input="x:\n\n<think>hm", **asks)
    assert [item["type"] for item in json.loads(events[-1])["response"]["output"]] == ["function_call"]


def test_an_answer_can_be_handed_back(server):
    said, more = server.got(CHAT)["choices"][0]["message"], {"role": "user", "content": "x"}
    server.got(CHAT, messages=[*ASKED[CHAT]["messages"], said, more])
    output = server.got(RESPONSES, include=["message.output_text.logprobs"], top_logprobs=1)["output"]
    server.got(RESPONSES, input=[{"role": "user", "content": PROMPT}, *output, more])


@pytest.mark.parametrize("template", utils._RESPONSE_TEMPLATE_FALLBACKS.values(), ids=lambda value: "")
def test_no_pattern_of_a_template_looks_at_white_space_again_and_again(template, server, monkeypatch):
    prompt = server.tokenizer("<|im_start|>assistant\n")["input_ids"]
    text = f"<tool_call>\n<function=paint>\n<parameter=colour>{' ' * 30_000}red</function></tool_call>{' ' * 30_000}."
    ids = server.tokenizer(text, add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(server.tokenizer, "response_template", template, raising=False)
    answer = Answers(server.tokenizer, server.target).begin(prompt, [])
    answer.parts(server.tokenizer.decode(ids))  # which takes an hour where one does


@pytest.mark.parametrize("prompt", ["def", "", [1, 4, 5], "half a character"])
@pytest.mark.parametrize("text", ["  x", " \u20ac \u20ac"])
def test_a_completion_goes_on_where_its_prompt_ends(prompt, text, server, says, monkeypatch):
    """The tokenizer takes the first space off what it decodes, as SentencePiece's do."""
    inner = server.tokenizer._tokenizer
    own, inner.decoder = inner.decoder, decoders.Sequence([inner.decoder, decoders.Strip(" ", 1, 0)])
    expected = text if prompt in ("def", [1, 4, 5]) else text.removeprefix(" ")  # which a new text begins with
    try:
        if prompt == "half a character":
            prompt = [5, *server.tokenizer("\u20ac", add_special_tokens=False)["input_ids"][:-1]]
        asks = {"prompt": prompt, "max_tokens": says(text), "logprobs": 0}
        whole, events = server.got(COMPLETIONS, **asks), server.got(COMPLETIONS, stream=True, **asks)
        shown = server.text(COMPLETIONS, echo=True, **asks)
    finally:
        inner.decoder = own
    assert read(whole) == read(events) and read(whole).text == expected
    assert not isinstance(prompt, str) or shown.endswith(prompt + expected)


def test_pieces_of_sentencepiece_are_told_by_their_bytes():
    words = ("\u2581a", "<0xC3>", "<0xA9>", "<s>")
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    pieces = Pieces(PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>"))
    told = [pieces.one(token) for token in range(5)]
    assert [bytes(one["bytes"]) for one in told] == [b" a", b"\xc3", b"\xa9", b"<s>", b""]
    assert [one["token"] for one in told[:3]] == [" a", "bytes:\\xc3", "bytes:\\xa9"]


# ---- A JSON schema holds whole or is refused by name: xgrammar drops keywords without a word.


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


UNHELD = ["(?=ab)a", "a^b", "(^a$)+", "a(b|c$)d", r"\Aab", r"\0", r"^\t$", "\t", r"\cA", '"', r"\\", r"[\t]", r"\x22"]
HELD = [  # a schema, a value that meets it, one that does not
    ({"type": ["integer", "null"], "minimum": 3}, 4, 2),
    (a_text(const="a"), "a", "b"),
    ({"properties": {"a": INT}, "required": ["a"]}, {"a": 1}, {}),
    (an(properties={"a": INT}, additionalProperties=False), {"a": 1}, {"a": 1, "b": 2}),
    (an(additionalProperties=INT), {"b": 2}, {"b": "x"}),
    (an(patternProperties={"^x$": INT}, additionalProperties=False), {"x": 1}, {"y": 1}),
    (an(propertyNames={"pattern": "^a+$", "type": "string"}), {"a": 1}, {"b": 1}),
    (an(minProperties=1, maxProperties=1), {"a": 1}, {"a": 1, "b": 2}),
    (several(items=INT, minItems=1, maxItems=2), [1], [1, 2, 3]),
    (a_text(minLength=2, maxLength=2), "ab", "abc"),
    (a_text(pattern="^a|b$"), "a", "c"),
    (a_text(pattern="(^(ab){149}$|^b$)"), "ab" * 149, "c"),
    (a_text(pattern=r'^[^"]\d\W$|\x41'), "x1-", "x1x"),
    (a_text(format="date"), "2024-01-01", "x"),
    ({"type": "number", "exclusiveMinimum": 3}, 3.5, 3),
    (whole(multipleOf=7), 14, 8),
    ({"anyOf": [INT, {"type": "null"}], "description": "x"}, 1, "x"),
    ({"allOf": [INT]}, 1, "x"),
    ({**DEFINED, "$ref": "#/$defs/a"}, 1, "x"),
    (TREE, {"c": [{"c": []}]}, {"c": [1]}),
]

DROPPED = [  # schemas, the keyword by which they are refused
    ("uniqueItems", several(uniqueItems=True)),
    ("required", an(required=["z"])),
    ("propertyNames", an(properties={"b": INT}, propertyNames={"type": "string", "pattern": "a"})),
    ("oneOf", {"oneOf": [INT, {"type": "number"}]}),
    ("allOf", {"allOf": [INT, {"type": "integer", "maximum": 3}]}),
    ("type", {"allOf": [INT], "type": "integer"}, {"type": []}, a_text(enum=["a", 1]), whole(const=True)),
    ("minimum", {**DEFINED, "$ref": "#/$defs/a", "minimum": 3}, {"minimum": 3}, a_text(minimum=3)),
    ("patternProperties", an(properties={"x": INT}, patternProperties={"x": INT}),
     an(patternProperties={"^a+$": INT, "^ab?$": {"type": "string"}})),
    ("patternProperties.a{301}", an(patternProperties={"a{301}": {}})),
    ("pattern", *(a_text(pattern=pattern) for pattern in (
        *UNHELD, r"\U0001F600", "^([a-z]{1,30}[0-9]){1,30}$", "a{99999999999}", "a{" + "9" * 5000 + "}"))),
    ("$ref", {"$ref": "#k"}, {"$ref": "other.json"}),
    ("maxLength", a_text(pattern="a", maxLength=2), a_text(maxLength=10**9)),
    ("multipleOf", {"type": ["integer", "number"], "multipleOf": 7}, whole(multipleOf=0.5),
     whole(minimum=3, multipleOf=7), whole(multipleOf=10**6)),
    ("enum", {"enum": [str(i) for i in range(1_001)]}),
]  # fmt: skip


@pytest.fixture(scope="module")
def accepts():
    """Whether a grammar of single characters takes a text."""
    xgrammar = pytest.importorskip("xgrammar")
    grammars = Grammars(None, 128)
    info = xgrammar.TokenizerInfo(["<s>", *map(chr, range(1, 128))], stop_token_ids=[0])
    grammars.compiler = lambda ends: xgrammar.GrammarCompiler(info)

    def found(held, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(grammars.of(held, "schema", [0]), terminate_without_stop_token=True)
        return matcher.accept_string(text) and matcher.is_completed()

    return found


@pytest.mark.parametrize("row", range(len(HELD)))
def test_what_is_served_holds(row, accepts):
    schema, good, bad = HELD[row]
    check_schema(schema, "schema")
    assert accepts(schema, json.dumps(good)) and not accepts(schema, json.dumps(bad))
    assert schema.get("type") != "string" or not accepts(schema, '"a\t"'), "a letter that JSON escapes"


def test_what_would_be_dropped_is_refused_by_its_place():
    for keyword, *schemas in DROPPED:
        for schema in schemas:
            within = (schema, ""), (several(items=schema), ".items"), (an(properties={"a": schema}), ".properties.a")
            for wrap, place in within:
                with pytest.raises(Refused) as refused:
                    check_schema(wrap, "schema")
                assert refused.value.field == f"schema{place}.{keyword}", schema
                assert keyword == "enum" or "should" not in refused.value.reason, "what to write instead is said"
    deep: dict = {}
    for _ in range(5000):
        deep = {"type": "array", "items": deep}
    for bad in (deep, 5, {"properties": 5}, {"anyOf": {}}, {"items": [INT]}, {"type": "object", "required": "a"}):
        with pytest.raises(Refused, match=r"^schema"):
            check_schema(bad, "schema")


def test_references_of_a_function_stay_its_own(accepts):
    tools = [("grow", TREE), ("draw", DEFINED | an(properties={"default": {"$ref": "#/$defs/a"}}))]
    schema = call_schema([{"name": name, "parameters": schema} for name, schema in tools], "")
    grown = {"c": [{"c": []}]}
    for name, arguments, good in (("grow", grown, True), ("grow", {"c": [{"name": "grow", "arguments": grown}]}, False),
                                  ("draw", {"default": 1}, True), ("draw", {"default": "x"}, False)):  # fmt: skip
        assert accepts(schema, json.dumps({"name": name, "arguments": arguments})) == good


# ---- strict tools beside tool_choice auto


STRICT = [{"type": "function", "function": {**TOOL, "strict": True}}]
XML = {"open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>", "content": "xml-inline"}
GEMMA = {"open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "content": "json"}


def test_calls_of_strict_tools_are_held_to_their_schema_and_text_is_free(server, accepts, monkeypatch):
    monkeypatch.setattr(server.tokenizer, "response_template", QWEN, raising=False)
    assert server.text(CHAT, tools=STRICT) == server.text(CHAT, tools=TOOLS), "no call: the text is free"
    for name, template, text, good in (
        ("json", QWEN, "hello <b>", True),
        ("json", QWEN, f"x {CALL}", True),
        ("json", QWEN, '<tool_call>{"name": "sing", "arguments": {"anything": [1]}}</tool_call> bye', True),
        ("json", QWEN, CALL.replace("red", "green"), False),
        ("json", QWEN, CALL.replace("paint", "dance"), False),
        ("xml", {"fields": {"tool_calls": XML}}, XML_CALL, True),
        ("xml", {"fields": {"tool_calls": XML}}, XML_CALL.replace("red", "green"), False),
    ):
        tools = [*STRICT, {"type": "function", "function": {"name": "sing"}}]
        held, field = held_to(chosen({"tools": tools}, server.tokenizer), None, "", template)
        assert field == "tools" and accepts(held, text) == good, (name, text)
    loose = [{"type": "function", "function": {"name": "paint", "parameters": {"not": {}}, "strict": True}}]
    assert server.refusal(CHAT, tools=loose)["param"] == "tools[0].function.parameters.not"
    said = server.refusal(CHAT, tools=TOOLS, tool_choice="any")["message"]
    assert said == "tool_choice: expected none, auto, required or a named function, got 'any'"
    monkeypatch.setattr(server.tokenizer, "response_template", {"fields": {"tool_calls": GEMMA}})
    assert server.refusal(CHAT, tools=STRICT)["param"] == "tools[0].function.strict"
