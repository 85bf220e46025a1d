"""Every field of the server's table: what a request gets for it, whole and in events, or the place that is refused."""

from __future__ import annotations

import importlib
import json
import math
import sys
import typing
from unittest.mock import patch

import pytest
import torch
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses
from served import ASKED, LENGTH, OFFERED, PROMPT, SCHEMA, TOOLS, read, row_id, tokens
from transformers import LogitsProcessor

from gsd_kernels_hf import generate
from gsd_kernels_serve import fields
from gsd_kernels_serve.checks import Refused
from gsd_kernels_serve.fields import BOTH, CHAT, COMPLETIONS, ENDPOINTS, RESPONSES, TEMPLATED
from gsd_kernels_serve.schemas import Grammars

pytestmark = pytest.mark.slow


def of(treatment: str) -> set[tuple[str, str]]:
    return {(e, name) for e in ENDPOINTS for name, field in fields.rows(e).items() if field.treatment == treatment}


# ---- what an answer shows


def shown(endpoint: str, text: str = PROMPT) -> str:
    """What the model reads of a prompt, which the template ends."""
    return text if endpoint == COMPLETIONS else text + "\n"


def like(**other):
    """The text of another request."""
    return lambda server, endpoint, whole: read(whole).text == server.text(endpoint, **other)


def generated(text: str = PROMPT, **options):
    """The text of plain ``generate``; ``processor``: its logits processor, of the prompt's length."""

    def check(server, endpoint, whole):
        ids = server.tokenizer(shown(endpoint, text), return_tensors="pt")["input_ids"]
        given = {"max_new_tokens": 8, "do_sample": False, "graph_config": "plain", **options}
        if make := given.pop("processor", None):
            given["logits_processor"] = [make(server, ids.shape[1])]
        out = generate(server.target, ids, tokenizer=server.tokenizer, **given)[0, ids.shape[1] :]
        return read(whole).text == server.tokenizer.decode(out, skip_special_tokens=True)

    return check


def prompted(text: str):
    """The number of a prompt's tokens."""

    def check(server, _, whole):
        usage = whole["usage"]
        return usage.get("prompt_tokens", usage.get("input_tokens")) == tokens(server, text)

    return check


class Penalised(LogitsProcessor):
    """As OpenAI defines it."""

    def __init__(self, prompt: int, counted: bool) -> None:
        self.prompt, self.counted = prompt, counted

    def __call__(self, input_ids, scores):
        counts = torch.stack([torch.bincount(row[self.prompt :], minlength=scores.shape[1]) for row in input_ids])
        return scores - 1.5 * (counts if self.counted else counts > 0)


def penalised(counted: bool):
    return generated("x = [0, 0, 0, 0, ", max_new_tokens=16, processor=lambda _, at: Penalised(at, counted))


def ended(count: int):
    """A text that was cut at so many tokens."""
    return lambda server, _, whole: (
        (whole["gsd_kernels"]["new_tokens"], read(whole).finish in ("length", "incomplete")) == (count, True)
    )


def biased(server, endpoint, whole):
    return read(whole).text.count(server.tokenizer.decode([5])) == 8


def several(server, endpoint, whole):
    alone = [read(server.got(endpoint, temperature=2, seed=number)) for number in (4, 5)]
    return [read(whole, index) for index in (0, 1)] == alone and whole["usage"]["completion_tokens"] == 16


def prompts(server, endpoint, whole):
    two = [server.text(endpoint), server.text(endpoint, prompt="import os\n")]
    counted = sum(tokens(server, text) for text in (PROMPT, "import os\n"))
    return [c["text"] for c in whole["choices"]] == two and whole["usage"]["prompt_tokens"] == counted


def called(server, endpoint, whole):
    (text, ((name, arguments),), *_, finish, _) = read(whole)
    assert json.loads(arguments)["colour"] in ("red", "blue")
    return (text, name) == ("", "paint") and finish in ("tool_calls", "completed")


def objects(server, endpoint, whole):
    return read(whole).text.startswith("{") and "grammar" in whole["gsd_kernels"]["sources"]


def formed(server, endpoint, whole):
    """It has the form, and is the text that the grammar leaves of the bare model's."""
    found = json.loads(read(whole).text)
    assert set(found) == {"kind", "full"} and found["kind"] in ("list", "dict") and isinstance(found["full"], bool)

    def grammar(server, _):
        compiled = Grammars(server.tokenizer, server.target.config.vocab_size).of(SCHEMA, "schema", [2])
        return importlib.import_module("xgrammar.contrib.hf").LogitsProcessor(compiled)

    sampled = {"max_new_tokens": 64, "do_sample": True, "temperature": 1.5, "seed": 5}
    return generated(**sampled, processor=grammar)(server, endpoint, whole)


def close(found, expected) -> bool:
    return all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(found, expected, strict=True))


def log_probs_of(server, before: str, text: str) -> list[float]:
    """The bare model's, of a text behind another."""
    ids = server.tokenizer(before, return_tensors="pt")["input_ids"]
    answer = server.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = server.target(torch.cat([ids, answer], 1)).logits[0, ids.shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(1, answer[0, :, None])[:, 0].tolist()


def told(server, endpoint, whole):
    text, rows = server.text(endpoint), read(whole).logprobs["content"]
    assert read(whole).text == text and not read(server.got(endpoint)).logprobs
    assert all(len(one["top_logprobs"]) == 2 and one["top_logprobs"][0]["token"] == one["token"] for one in rows)
    assert b"".join(bytes(one["bytes"]) for one in rows).decode() == text == "".join(one["token"] for one in rows)
    return close([one["logprob"] for one in rows], log_probs_of(server, shown(endpoint), text))


def placed(columns, text: str) -> bool:
    """Whether tokens stand in a text where they are said to, and make it."""
    places = zip(columns["text_offset"], columns["tokens"], strict=True)
    found = [token for at, token in places if text[at:].startswith(token)]
    return "".join(found) == text and len(found) >= len(columns["tokens"]) - 1


def told_in_columns(server, endpoint, whole):
    text, columns = server.text(endpoint), read(whole).logprobs
    assert placed(columns, text) and all(len(top) == 2 for top in columns["top_logprobs"])
    return close(columns["token_logprobs"], log_probs_of(server, PROMPT, text))


def echoed(server, endpoint, whole):
    text, columns = server.text(endpoint, max_tokens=3), read(whole).logprobs
    assert read(whole).text == PROMPT + text and whole["usage"]["completion_tokens"] == 6
    assert columns["tokens"][0] == "<|bos|>" and columns["token_logprobs"][0] is None is columns["top_logprobs"][0]
    expected = log_probs_of(server, "", PROMPT) + log_probs_of(server, PROMPT, text)
    return placed(columns, PROMPT + text) and close(columns["token_logprobs"][1:], expected)


def held(endpoint: str, kind: str, **more: object) -> dict[str, object]:
    form = {"type": kind, **(more if endpoint == RESPONSES or not more else {"json_schema": more})}
    return {"text": {"format": form}} if endpoint == RESPONSES else {"response_format": form}


CALLED = {"id": "1", "type": "function", "function": {"name": "paint", "arguments": "{}"}}
CUT = {**CALLED, "function": {"name": "paint", "arguments": '{"colour": "re'}}
NAMED = {CHAT: {"type": "function", "function": {"name": "paint"}}, RESPONSES: {"type": "function", "name": "paint"}}
SAMPLED = {"do_sample": True, "temperature": 2.0, "seed": 1}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "import os"}]},
    {"type": "function_call", "call_id": "1", "name": "paint", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "x"},
]


def user(content: object, **more: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content, **more}]


def said(**message: object) -> list[dict[str, object]]:
    return [*user(PROMPT), {"role": "assistant", **message}]


def cached(text: str) -> list[dict[str, object]]:
    return user([{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}])


def at_zero(endpoint: str) -> dict[str, object]:
    zeros = user("x = [0, 0, 0, 0, ")
    return {"prompt": zeros[0]["content"]} if endpoint == COMPLETIONS else {"messages": zeros}


GIVEN: list[tuple[tuple[str, ...], typing.Any, typing.Any]] = [
    # endpoints, a request (or what makes it of the endpoint), what its answer shows
    (ENDPOINTS, {"model": "small"}, lambda server, endpoint, whole: whole["model"] == "small"),
    ((CHAT,), {"messages": user("import os") + cached("x")}, prompted("import os\nx\n")),
    ((CHAT,), {"messages": said(content=None, tool_calls=[CUT])},
     prompted(PROMPT + '\npaint: {"colour": "re\n')),  # as max_tokens leaves a forced call
    ((COMPLETIONS,), {"prompt": [PROMPT, "import os\n"]}, prompts),
    ((RESPONSES,), {"input": ITEMS}, prompted("import os\n# calls paint\n\nx\n")),
    ((RESPONSES,), {"instructions": "import os", "input": [{"role": "developer", "content": "x"}, *user(PROMPT)]},
     prompted(f"system import os\nsystem x\n{PROMPT}\n")),
    ((CHAT,), {"messages": user("x") + user("y", name="ann")}, prompted("x\n# ann\ny\n")),
    (TEMPLATED, lambda e: {"tools": OFFERED[e]}, prompted(f"# paint\n{PROMPT}\n")),
    (TEMPLATED, lambda e: {"tools": OFFERED[e], "tool_choice": "none"}, like()),
    (TEMPLATED, lambda e: {"tools": OFFERED[e], LENGTH[e]: 64, "tool_choice": NAMED[e]}, called),
    (TEMPLATED, lambda e: {"tools": OFFERED[e], LENGTH[e]: 64, "tool_choice": "required"}, called),
    (TEMPLATED, {"chat_template_kwargs": {"flavour": "sweet"}}, prompted(f"# sweet\n{PROMPT}\n")),
    ((CHAT,), {"reasoning_effort": "low"}, prompted(f"# effort low\n{PROMPT}\n")),
    ((RESPONSES,), {"reasoning": {"effort": "low", "summary": "auto"}}, prompted(f"# effort low\n{PROMPT}\n")),
    (ENDPOINTS, {"temperature": 0.9, "seed": 7}, generated(do_sample=True, temperature=0.9, seed=7)),
    (ENDPOINTS, {"temperature": 2, "seed": 1, "top_p": 0.4}, generated(**SAMPLED, top_p=0.4)),
    (ENDPOINTS, {"temperature": ..., "seed": 1, "top_k": 5}, generated(do_sample=True, seed=1, top_k=5)),
    (ENDPOINTS, {"temperature": 2, "seed": 1, "min_p": 0.3}, generated(**SAMPLED, min_p=0.3)),
    (BOTH, lambda e: {"frequency_penalty": 1.5, "max_tokens": 16, **at_zero(e)}, penalised(True)),
    (BOTH, lambda e: {"presence_penalty": 1.5, "max_tokens": 16, **at_zero(e)}, penalised(False)),
    (ENDPOINTS, {"repetition_penalty": 5.0}, generated(repetition_penalty=5.0)),
    (BOTH, {"logit_bias": {"5": 100}}, biased),
    (TEMPLATED, lambda e: held(e, "text"), like()),
    (TEMPLATED, lambda e: held(e, "json_object"), objects),
    (TEMPLATED, lambda e: {**held(e, "json_schema", name="one", schema=SCHEMA, strict=True), LENGTH[e]: 64,
                           "temperature": 1.5, "seed": 5}, formed),
    (ENDPOINTS, lambda e: {"generation_config": '{"max_new_tokens": 3, "num_beams": 1}', LENGTH[e]: ...}, ended(3)),
    (BOTH, {"max_tokens": 3}, ended(3)),
    ((CHAT,), {"max_tokens": ..., "max_completion_tokens": 3}, ended(3)),
    ((RESPONSES,), {"max_output_tokens": 3}, ended(3)),
    (BOTH, {"stop": "self", "max_tokens": 24}, generated(stop_strings="self", max_new_tokens=24)),
    (BOTH, {"stop": ["nowhere", "("]}, generated(stop_strings=["nowhere", "("])),
    (BOTH, {"n": 2, "temperature": 2, "seed": 4}, several),
    ((COMPLETIONS,), {"n": 2, "best_of": 2, "temperature": 2, "seed": 4}, several),
    ((CHAT,), {"prediction": {"type": "content", "content": [{"type": "text", "text": "zzz"}]}}, like()),
    (ENDPOINTS, {"stream": False}, generated()),
    ((CHAT,), {"logprobs": True, "top_logprobs": 2}, told),
    ((RESPONSES,), {"include": ["message.output_text.logprobs"], "top_logprobs": 2}, told),
    ((COMPLETIONS,), {"logprobs": 2}, told_in_columns),
    ((COMPLETIONS,), {"echo": True, "logprobs": 2, "max_tokens": 3, "n": 2}, echoed),
    ((COMPLETIONS,), {"echo": True, "max_tokens": 0}, lambda _, __, whole: read(whole).text == PROMPT),
    ((RESPONSES,), {"metadata": {"a": "b"}}, lambda _, __, whole: whole["metadata"] == {"a": "b"}),
    # ---- harmless, whatever they hold
    (ENDPOINTS, {"user": "me"}, like()),
    (TEMPLATED, {"safety_identifier": "me", "prompt_cache_key": "me", "service_tier": "auto",
                 "parallel_tool_calls": False}, like()),
    ((CHAT,), {"verbosity": "low"}, like()),
    ((RESPONSES,), {"max_tool_calls": 3}, like()),
]  # fmt: skip
ASKS = [(e, given(e) if callable(given) else given, shows) for endpoints, given, shows in GIVEN for e in endpoints]


@pytest.mark.parametrize(
    ("endpoint", "given", "shows"), ASKS, ids=[f"{i}-{row_id(row[0])}" for i, row in enumerate(ASKS)]
)
def test_a_request_gets_what_it_asks_for_whole_and_in_events(endpoint, given, shows, server):
    if {"tool_choice", "response_format", "text"} & given.keys():
        pytest.importorskip("xgrammar")
    whole, events = server.got(endpoint, **given), server.got(endpoint, **{**given, "stream": True})
    assert shows(server, endpoint, whole)
    for index in range(len(whole.get("choices", [0]))):
        assert read(whole, index) == read(events, index)
    last = json.loads(events[-1])
    last = last.get("response", last)
    assert last["usage"] == whole["usage"] and type(last["gsd_kernels"]) is type(whole["gsd_kernels"])


@pytest.mark.parametrize("endpoint", BOTH, ids=row_id)
def test_usage_is_in_an_event_of_its_own_or_nowhere(endpoint, server):
    for named in (True, False):
        options = {"include_usage": named, "include_obfuscation": False}
        events = [json.loads(event) for event in server.got(endpoint, stream=True, stream_options=options)]
        assert [event["choices"] for event in events if event.get("usage")] == [[]] * named


CLIENT = {CHAT: chat.CompletionCreateParams, COMPLETIONS: completions.CompletionCreateParams,
          RESPONSES: responses.ResponseCreateParams}  # fmt: skip


def test_the_table_has_every_field_of_the_client_and_every_row_is_tried():
    tried = {(e, name) for e, given, _ in ASKS for name in given} | {(e, "stream_options") for e in BOTH}
    assert tried == of(fields.HONOURED) | of(fields.HARMLESS)
    for endpoint in ENDPOINTS:
        known = {name for kind in typing.get_args(CLIENT[endpoint]) for name in typing.get_type_hints(kind)}
        assert not known - set(fields.rows(endpoint)), "fields of OpenAI's client that nothing is decided about"
        assert not {name for name, field in fields.rows(endpoint).items() if field.own} & known


# ---- refused, by the place that is why


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=row_id)
def test_what_is_not_served_says_so_but_for_what_asks_for_nothing(endpoint, server):
    for name in (name for where, name in sorted(of(fields.REFUSED)) if where == endpoint):
        refused = server.refusal(endpoint, **{name: {"x": "y"}})
        assert refused["param"] == name and refused["message"].startswith(f"{name}: not served")
        for value in (None, *fields.rows(endpoint)[name].default):
            assert fields.check(endpoint, {**ASKED[endpoint], name: value}) == ASKED[endpoint]


DEEP = "[" * 100 + "]" * 100


def chosen(name: object) -> dict[str, object]:
    return {"type": "function", "function": name}


REFUSED: list[tuple[tuple[str, ...], dict[str, typing.Any], str]] = [
    # endpoints, fields, and the place that is named
    *((endpoints, {name: value}, name) for name, endpoints, values in (
        ("temperature", ENDPOINTS, (3, "hot")),
        ("seed", ENDPOINTS, (2**80,)),
        ("stream", ENDPOINTS, ("yes",)),
        ("generation_config", ENDPOINTS, ("{",)),
        ("logit_bias", BOTH, ({"1000000": 1}, [1])),
        ("max_tokens", BOTH, (0,)),
        ("stop", BOTH, (["x"] * 17,)),
        ("best_of", (COMPLETIONS,), (2,)),
        ("logprobs", BOTH, ("yes",)),
        ("top_logprobs", TEMPLATED, (2,)),  # alone
        ("stream_options", BOTH, ({"include_usage": True},)),  # of no stream
        ("prompt", (COMPLETIONS,), ([], [[1, "x"]], [10**6])),
        ("tool_choice", TEMPLATED, ("required",)),  # without tools
        ("best_off", ENDPOINTS, (1,)),  # which nobody knows
    ) for value in values),
    *(((COMPLETIONS,), {"logit_bias": {"5": bad}}, "logit_bias.5") for bad in (None, 101)),
    (BOTH, {"stop": [""]}, "stop[0]"),
    ((RESPONSES,), {"include": ["reasoning.encrypted_content"]}, "include[0]"),
    ((COMPLETIONS,), {"prompt": [PROMPT, 3]}, "prompt[1]"),
    *(((COMPLETIONS,), {"stream": False, "repetition_penalty": 2, "generation_config": json.dumps(bad)},
       f"generation_config.{list(bad)[-1]}")
      for bad in ({"num_beams": 3}, {"unheard_of": 3}, {"temperature": 0.7}, {"eos_token_id": "x"})),
    ((CHAT,), {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ((CHAT,), {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    *((TEMPLATED, {"chat_template_kwargs": {bad: "sweet"}}, f"chat_template_kwargs.{bad}")
      for bad in ("taste", "messages")),  # unread, or the server's own
    # ---- messages and items
    ((CHAT,), {"messages": user([{"type": "image_url", "image_url": {"url": "data:,"}}])},
     "messages[0].content[0].type"),
    ((CHAT,), {"messages": user("", tool_call_id="1")}, "messages[0].tool_call_id"),
    *(((CHAT,), {"messages": user(PROMPT, name="ann") + more}, "messages[0].name")  # which the template shows of others
      for more in ([], user("x", name="bob"))),
    ((CHAT,), {"messages": said(tool_calls=[chosen({"name": "paint", "arguments": f'{{"a": {DEEP}}}'})])},
     "messages[1].tool_calls[0].function.arguments"),
    ((RESPONSES,), {"input": user([{"type": "input_image", "image_url": "data:,"}])}, "input[0].content[0].type"),
    ((RESPONSES,), {"input": [{"type": "item_reference", "id": "1"}]}, "input[0].type"),
    ((CHAT,), {"prediction": {"type": "content", "content": [{"type": "text"}]}}, "prediction.content[0].text"),
    # ---- tools
    (TEMPLATED, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ((CHAT,), {"tools": TOOLS * 2}, "tools[1].function.name"),
    ((CHAT,), {"tools": TOOLS, "tool_choice": chosen({"name": "sing"})}, "tool_choice"),
    ((CHAT,), {"tools": TOOLS, "tool_choice": chosen({"name": ["paint"]})}, "tool_choice.function.name"),
    # ---- forms
    ((CHAT,), {"response_format": {"type": "yaml"}}, "response_format.type"),
    ((CHAT,), {"response_format": {"type": "json_object"}, "tools": TOOLS}, "response_format"),
    ((CHAT,), held(CHAT, "json_schema", name="one", schema={"not": {}}), "response_format.json_schema.schema.not"),
    ((RESPONSES,), {"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format.schema.not"),
]  # fmt: skip


@pytest.mark.parametrize("place", dict.fromkeys(place for _, _, place in REFUSED))
def test_a_value_that_is_not_served_is_refused_by_its_place(place, server):
    for endpoints, given, at in REFUSED:
        for endpoint in endpoints if at == place else ():
            assert server.refusal(endpoint, **given)["param"] == place, (endpoint, given)


def test_a_grammar_is_refused_to_which_the_models_own_options_leave_no_token(server, monkeypatch):
    pytest.importorskip("xgrammar")
    monkeypatch.setattr(server.target.generation_config, "suppress_tokens", list(range(3, 2048)))
    for endpoint, place in zip(TEMPLATED, ("response_format", "text"), strict=True):
        assert server.refusal(endpoint, stream=False, **held(endpoint, "json_object"))["param"] == place


def test_a_prompt_without_room_needs_a_length_that_is_named(server, caplog):
    positions = server.target.config.max_position_embeddings
    assert server.refusal(COMPLETIONS, max_tokens=..., prompt=[5] * positions)["param"] == "prompt"
    with patch.object(server.target, "named_modules", wraps=server.target.named_modules) as walks:
        server.refusal(COMPLETIONS, prompt=["a"] * 40, n=60)
    assert walks.call_count < 9, "a request is one walk, however many prompts it has"
    for count, most, new in ((positions - 3, ..., 3), (positions, 2, 2)):
        assert server.got(COMPLETIONS, max_tokens=most, prompt=[5] * count)["usage"]["completion_tokens"] == new
    assert any(f"beyond the {positions} positions" in line for line in caplog.messages)


# ---- what is huge, deep, many, or no text


ODD = ("\ud800", "x\udfffx", float("nan"), float("-inf"))
HOSTILE = [*ODD, *([odd] for odd in ODD), *({"a": [odd]} for odd in ODD), *({odd: 1} for odd in ODD[:2])]
HUGE = (
    "x" * 300_000,
    10**4000,
    json.loads("[" * 800 + "]" * 800),
    user("x") * 12_000,
    dict.fromkeys(map(str, range(12_000))),
)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=row_id)
def test_every_field_has_a_bound_and_takes_nothing_that_no_answer_could_repeat(endpoint, server):
    for i, (name, field) in enumerate(fields.rows(endpoint).items()):
        for value in HOSTILE:
            with pytest.raises(Refused) as refused:
                fields.check(endpoint, {**ASKED[endpoint], name: value})
            assert refused.value.field == name
        value = HUGE[i % len(HUGE)]
        status, found = server.raw(endpoint, {**ASKED[endpoint], LENGTH[endpoint]: 1, name: value})
        places = (name, "input") if name == "instructions" else (name,)  # which are read together
        accepted = status == 200 and isinstance(value, (str, int)) and field.treatment != fields.REFUSED
        assert accepted or (status == 400 and found["error"]["param"].startswith(places)), (name, found)
    for body in (b"[]", b"{", b"\xff", b'{"prompt":' + b"[" * 100_000 + b"}", b'{"\\ud800": 1}'):
        status, found = server.raw(endpoint, body)
        assert status == 400 and found["error"]["type"] == "invalid_request_error"


def test_a_bias_may_name_as_many_tokens_as_its_bound_says():
    body = {"prompt": PROMPT, "logit_bias": {str(100_000 + i): -100.0 for i in range(9_999)}}
    assert fields.check(COMPLETIONS, body) == body


def test_without_xgrammar_the_extra_is_named(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    refused = server.refusal(CHAT, response_format={"type": "json_object"})
    assert refused["param"] == "response_format" and ".[grammar]" in refused["message"]
