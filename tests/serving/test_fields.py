"""Every row of the server's table, on a running server: an effect, a refusal by its name, or nothing at all."""

from __future__ import annotations

import json
import math
import typing
from functools import partial
from itertools import chain

import pytest
import torch
from served import LENGTH, OFFERED, PROMPT, SCHEMA, TOOL, Server, known, read, row_id, tokens
from transformers import LogitsProcessorList

from gsd_kernels_hf import generate
from gsd_kernels_serve import fields
from gsd_kernels_serve.fields import BOTH, CHAT, COMPLETIONS, RESPONSES, TEMPLATED
from gsd_kernels_serve.processors import Grammar, Grammars

pytestmark = pytest.mark.slow


# ---- What honoured fields do, seen in answers: those that say what is asked, and which text it gets


EFFECTS: dict[tuple[str, str], typing.Callable[[Server, str], None]] = {}
"""Of honoured fields by endpoint: what shows that they act."""


def effect(name: str, *endpoints: str):
    def keep(test):
        EFFECTS.update({(endpoint, name): test for endpoint in endpoints or fields.ENDPOINTS})
        return test

    return keep


@effect("model")
def model(server, endpoint):
    assert server.got(endpoint)["model"] == "small"
    status, found = server.ask(endpoint, model="other")
    assert status == 404 and found["error"]["param"] == "model"


@effect("messages", CHAT)
def messages(server, endpoint):
    two = [{"role": "user", "content": "import os"}, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]
    assert server.got(endpoint, messages=two)["usage"]["prompt_tokens"] == tokens(server, "import os\nx\n")


@effect("prompt", COMPLETIONS)
def prompt(server, endpoint):
    other = "import os\n"
    texts = [server.text(endpoint, prompt=one) for one in (PROMPT, other)]
    ids = [server.tokenizer(one)["input_ids"] for one in (PROMPT, other)]
    assert server.text(endpoint, prompt=ids[0]) == texts[0]
    for given in ([PROMPT, other], ids):
        found = server.got(endpoint, prompt=given)
        assert [choice["text"] for choice in found["choices"]] == texts
        assert [choice["index"] for choice in found["choices"]] == [0, 1] and len(found["gsd_kernels"]) == 2
        assert found["usage"]["prompt_tokens"] == sum(map(len, ids)) and found["usage"]["completion_tokens"] == 16


@effect("input", RESPONSES)
def input_(server, endpoint):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "import os"}]},
        {"type": "function_call", "call_id": "1", "name": "paint", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
    ]
    assert server.got(endpoint, input=items)["usage"]["input_tokens"] == tokens(
        server, "import os\n# calls paint\n\nx\n"
    )


@effect("instructions", RESPONSES)
def instructions(server, endpoint):
    spoken = [{"role": "developer", "content": "import re"}, {"role": "user", "content": PROMPT}]
    found = server.got(endpoint, instructions="import os", input=spoken)
    both = "system import os\nsystem import re\n" + PROMPT + "\n"
    assert found["usage"]["input_tokens"] == tokens(server, both)
    found = server.got(endpoint, instructions="import os")
    assert found["usage"]["input_tokens"] == tokens(server, "system import os\n" + PROMPT + "\n")
    assert found["instructions"] == "import os"


@effect("tools", *TEMPLATED)
def tools(server, endpoint):
    usage = server.got(endpoint, tools=OFFERED[endpoint])["usage"]
    assert usage["total_tokens"] == tokens(server, "# paint\n" + PROMPT + "\n") + 8


@effect("tool_choice", *TEMPLATED)
def tool_choice(server, endpoint):
    offered = {"tools": OFFERED[endpoint], LENGTH[endpoint]: 64}
    shown = server.text(endpoint, **offered)
    assert server.text(endpoint, **offered, tool_choice="auto") == shown
    assert server.text(endpoint, **offered, tool_choice="none") == server.text(endpoint, **{LENGTH[endpoint]: 64})
    assert not server.text(endpoint, **{LENGTH[endpoint]: 64}).startswith(shown), "the template shows them"
    pytest.importorskip("xgrammar")
    named = {"type": "function", "name": "paint"}
    for choice in ("required", named if endpoint == RESPONSES else {"type": "function", "function": {"name": "paint"}}):
        found = server.got(endpoint, **offered, tool_choice=choice)
        text, ((name, arguments),) = read(found)
        assert (text, name) == ("", "paint") and json.loads(arguments)["colour"] in ("red", "blue")
        events = server.got(endpoint, **offered, tool_choice=choice, stream=True)
        assert read(events) == (text, [(name, arguments)])
        if endpoint == CHAT:
            last = json.loads(events[-2])["choices"][0]
            assert found["choices"][0]["finish_reason"] == last["finish_reason"] == "tool_calls"
        else:
            assert found["status"] == json.loads(events[-1])["response"]["status"] == "completed"


@effect("chat_template_kwargs", CHAT, RESPONSES)
def chat_template_kwargs(server, endpoint):
    plain, other = server.got(endpoint), server.got(endpoint, chat_template_kwargs={"flavour": "sweet"})
    assert other["usage"]["total_tokens"] - plain["usage"]["total_tokens"] == tokens(server, "# sweet\n") - tokens(
        server, ""
    )


@effect("reasoning_effort", CHAT)
def reasoning_effort(server, endpoint):
    assert server.got(endpoint, reasoning_effort="low")["usage"]["prompt_tokens"] > tokens(server, PROMPT + "\n")


@effect("reasoning", RESPONSES)
def reasoning(server, endpoint):
    found = server.got(endpoint, reasoning={"effort": "low"})
    assert found["usage"]["input_tokens"] > tokens(server, PROMPT + "\n")
    assert server.text(endpoint, reasoning={"summary": "auto"}) == server.text(endpoint)


@effect("temperature")
def temperature(server, endpoint):
    greedy = server.text(endpoint, temperature=...)
    assert server.text(endpoint, temperature=0) == greedy
    assert len({server.text(endpoint, temperature=2) for _ in range(3)}) > 1


def narrowed(name: str, narrow: float, wide: float):
    def test(server, endpoint):
        assert server.text(endpoint, temperature=2, **{name: narrow}) == server.text(endpoint)
        long = {LENGTH[endpoint]: 24, "temperature": ..., name: wide}
        assert len({server.text(endpoint, **long) for _ in range(3)}) > 1, "it samples without a temperature"

    effect(name)(test)


narrowed("top_p", 1e-6, 0.999)
narrowed("top_k", 1, 0)
narrowed("min_p", 1.0, 0.001)


@effect("seed")
def seed(server, endpoint):
    first, second = (server.text(endpoint, temperature=2, seed=number) for number in (1, 2))
    assert server.text(endpoint, temperature=2, seed=1) == first != second


def penalised(server, endpoint, name) -> None:
    """As OpenAI defines it, token by token, of the bare model's logits."""
    prompt = "x = [0, 0, 0, 0, "
    shown = {"prompt": prompt} if endpoint == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
    ids = server.tokenizer(prompt + ("\n" if endpoint == CHAT else ""), return_tensors="pt")["input_ids"]
    start, text = ids.shape[1], server.text(endpoint, max_tokens=16, **shown)
    for _ in range(16):
        with torch.no_grad():
            logits = server.target(ids).logits[0, -1]
        counts = torch.bincount(ids[0, start:], minlength=len(logits))
        logits = logits - 1.5 * (counts if name == "frequency_penalty" else (counts > 0))
        ids = torch.cat([ids, logits.argmax()[None, None]], 1)
    expected = server.tokenizer.decode(ids[0, start:])
    assert server.text(endpoint, max_tokens=16, **{name: 1.5}, **shown) == expected != text


for name in ("frequency_penalty", "presence_penalty"):
    effect(name, *BOTH)(partial(penalised, name=name))


@effect("repetition_penalty")
def repetition_penalty(server, endpoint):
    assert server.text(endpoint, repetition_penalty=5.0) != server.text(endpoint)


@effect("logit_bias", CHAT, COMPLETIONS)
def logit_bias(server, endpoint):
    token = server.tokenizer(" x", add_special_tokens=False)["input_ids"][0]
    assert server.text(endpoint, logit_bias={str(token): 100}).count(server.tokenizer.decode([token])) == 8
    assert server.text(endpoint, logit_bias={}) == server.text(endpoint)


@effect("response_format", CHAT)
@effect("text", RESPONSES)
def form(server, endpoint):
    def held(kind: str, **more: object) -> dict[str, object]:
        if endpoint == RESPONSES:
            return {"text": {"format": {"type": kind, **more}}}
        return {"response_format": {"type": kind, **({"json_schema": more} if more else {})}}

    assert server.text(endpoint, **held("text")) == server.text(endpoint)
    if endpoint == RESPONSES:
        assert server.text(endpoint, text={"verbosity": "low"}) == server.text(endpoint)
    pytest.importorskip("xgrammar")
    assert server.text(endpoint, **held("json_object")).startswith("{")
    form = held("json_schema", name="one", schema=SCHEMA, strict=True)
    for sampled in ({"temperature": 0}, {"temperature": 1.5, "seed": 5}):
        text = server.text(endpoint, **{LENGTH[endpoint]: 64}, **sampled, **form)
        found = json.loads(text)
        assert set(found) == {"kind", "full"} and found["kind"] in ("list", "dict") and isinstance(found["full"], bool)
    statistics = server.got(endpoint, **{LENGTH[endpoint]: 64}, temperature=0, **form)["gsd_kernels"]
    assert "grammar" in statistics["sources"]
    ids = server.tokenizer(PROMPT + "\n", return_tensors="pt")["input_ids"]
    compiled = Grammars(server.tokenizer, server.target.config.vocab_size).of(SCHEMA, "schema", [2])
    bare = LogitsProcessorList([Grammar(compiled, ids.shape[1])])
    options = {"max_new_tokens": 64, "do_sample": True, "temperature": 1.5, "seed": 5}
    out = generate(server.target, ids, logits_processor=bare, tokenizer=server.tokenizer, **options)
    assert server.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == text, "as without a draft"


@effect("generation_config")
def generation_config(server, endpoint):
    given = json.dumps({"max_new_tokens": 3, "transformers_version": "5", "num_beams": 1})
    found = server.got(endpoint, generation_config=given, **{LENGTH[endpoint]: ...})
    assert found["gsd_kernels"]["new_tokens"] == 3


# ---- What honoured fields do, seen in answers: where texts end, how many there are, and what is told of them


@effect("max_tokens", CHAT, COMPLETIONS)
@effect("max_completion_tokens", CHAT)
def length(server, endpoint, names=("max_tokens", "max_completion_tokens")):
    for name in names[: 2 if endpoint == CHAT else 1]:
        found = server.got(endpoint, **{"max_tokens": ..., name: 3})
        assert found["usage"]["completion_tokens"] == 3 and found["choices"][0]["finish_reason"] == "length"


@effect("max_output_tokens", RESPONSES)
def max_output_tokens(server, endpoint):
    found = server.got(endpoint, max_output_tokens=3)
    assert found["usage"]["output_tokens"] == 3 and found["status"] == "incomplete"


@effect("stop", CHAT, COMPLETIONS)
def stop(server, endpoint):
    whole = server.text(endpoint)
    word = whole.split()[0]
    for given in (word, ["nowhere", word]):
        found = server.got(endpoint, stop=given)
        assert found["choices"][0]["finish_reason"] == "stop" and found["usage"]["completion_tokens"] < 8
    assert server.text(endpoint, stop=[]) == whole


@effect("n", CHAT, COMPLETIONS)
def n(server, endpoint):
    found = server.got(endpoint, n=2, temperature=2, seed=4)
    alone = [server.got(endpoint, temperature=2, seed=number)["choices"][0] for number in (4, 5)]
    keys = ("message", "text")
    assert [[c.get(k) for k in keys] for c in found["choices"]] == [[c.get(k) for k in keys] for c in alone]
    assert found["usage"]["completion_tokens"] == 16
    events = server.got(endpoint, n=2, temperature=2, seed=4, stream=True)
    assert [read(events, index) for index in (0, 1)] == [read(found, index) for index in (0, 1)]


@effect("best_of", COMPLETIONS)
def best_of(server, endpoint):
    assert len(server.got(endpoint, n=2, best_of=2)["choices"]) == 2


@effect("prediction", CHAT)
def prediction(server, endpoint):
    text = server.text(endpoint, max_tokens=48, temperature=2, seed=11)

    steps = [
        server.got(endpoint, max_tokens=48, temperature=2, seed=11, prediction=given)["gsd_kernels"]["tokens_per_step"]
        for given in (None, {"type": "content", "content": PROMPT + text}, {"type": "content", "content": "zzz"})
    ]
    assert steps[1] > max(steps[0], steps[2])
    parts = {"type": "content", "content": [{"type": "text", "text": text}]}
    assert server.text(endpoint, max_tokens=48, temperature=2, seed=11, prediction=parts) == text


@effect("stream")
def stream(server, endpoint):
    events = server.got(endpoint, stream=True)
    if endpoint == RESPONSES:
        found = [json.loads(event) for event in events]
        assert found[-1]["type"] == "response.incomplete"
        response = found[-1]["response"]
        assert response["gsd_kernels"]["new_tokens"] == response["usage"]["output_tokens"] == 8
    else:
        found = [json.loads(event)["choices"][0] for event in events[:-1]]
        assert events[-1] == "[DONE]" and [c["finish_reason"] for c in found if c["finish_reason"]] == ["length"]
        assert json.loads(events[-2])["gsd_kernels"]["new_tokens"] == 8
    assert read(events)[0] == server.text(endpoint) == server.text(endpoint, stream=False)


@effect("stream_options", CHAT, COMPLETIONS)
def stream_options(server, endpoint):
    def events(**options):
        return [json.loads(e) for e in server.got(endpoint, stream=True, stream_options=options)[:-1]]

    with_usage, without = events(include_usage=True), events(include_usage=False, include_obfuscation=False)
    assert with_usage[-1]["choices"] == [] and with_usage[-1]["usage"]["completion_tokens"] == 8
    assert not any(event.get("usage") for event in [*with_usage[:-1], *without])


@effect("logprobs", CHAT, COMPLETIONS)
@effect("top_logprobs", CHAT)
def logprobs(server, endpoint):
    named = {"logprobs": True, "top_logprobs": 2} if endpoint == CHAT else {"logprobs": 2}
    choice = server.got(endpoint, **named)["choices"][0]
    found = choice["logprobs"]
    text = server.text(endpoint)
    ids = server.tokenizer(PROMPT + ("\n" if endpoint == CHAT else ""), return_tensors="pt")["input_ids"]
    answer = server.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = server.target(torch.cat([ids, answer], 1)).logits[0, ids.shape[1] - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, answer[0, :, None])[:, 0].tolist()
    if endpoint == CHAT:
        assert "".join(one["token"] for one in found["content"]) == text
        assert b"".join(bytes(one["bytes"]) for one in found["content"]).decode() == text
        got = [one["logprob"] for one in found["content"]]
        assert all(len(one["top_logprobs"]) == 2 for one in found["content"])
        assert all(one["top_logprobs"][0]["token"] == one["token"] for one in found["content"])
        assert server.got(endpoint)["choices"][0].get("logprobs") is None
    else:
        assert "".join(found["tokens"]) == text
        assert [text[a:].startswith(t) for a, t in zip(found["text_offset"], found["tokens"], strict=True)]
        got = found["token_logprobs"]
        assert all(len(top) == 2 for top in found["top_logprobs"])
    assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(got, expected, strict=True))
    events = [json.loads(event)["choices"][0] for event in server.got(endpoint, stream=True, **named)[:-1]]
    parts = [event["logprobs"] for event in events if event.get("logprobs")]
    joined: dict[str, list] = {}
    for part in parts:
        for key, values in part.items():
            joined[key] = joined.get(key, []) + (values or [])
    assert {key: value for key, value in joined.items() if value} == {k: v for k, v in found.items() if v}


@effect("include", RESPONSES)
@effect("top_logprobs", RESPONSES)
def logprobs_of_responses(server, endpoint):
    named = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (item,) = server.got(endpoint, **named)["output"]
    expected = server.got(CHAT, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    found = item["content"][0]["logprobs"]
    assert found == expected
    events = [json.loads(event) for event in server.got(endpoint, stream=True, **named)]
    parts = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert list(chain.from_iterable(parts)) == found == events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert not server.got(endpoint, include=[])["output"][0]["content"][0].get("logprobs")


@effect("echo", COMPLETIONS)
def echo(server, endpoint):
    whole = PROMPT + server.text(endpoint)
    assert server.text(endpoint, echo=True) == whole
    assert read(server.got(endpoint, echo=True, stream=True))[0] == whole
    assert server.text(endpoint, echo=True, max_tokens=0) == PROMPT
    choice = server.got(endpoint, echo=True, logprobs=2, max_tokens=3)["choices"][0]
    found, ids = choice["logprobs"], server.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = server.target(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    length = ids.shape[1]
    assert found["token_logprobs"][0] is None is found["top_logprobs"][0]
    for got, log_prob, top in zip(found["token_logprobs"][1:length], expected, found["top_logprobs"][1:], strict=False):
        assert math.isclose(got, log_prob, abs_tol=1e-4) and 2 <= len(top) <= 3
    first, *others = found["tokens"]
    assert len(others) == length + 2 and first == "<|bos|>" and "".join(others) == choice["text"]
    places = zip(found["text_offset"][1:], others, strict=True)
    assert all(choice["text"][at:].startswith(token) for at, token in places)
    after = server.got(endpoint, logprobs=2, max_tokens=3)["choices"][0]["logprobs"]
    assert found["token_logprobs"][length:] == after["token_logprobs"]
    alone = server.got(endpoint, echo=True, logprobs=2, max_tokens=0, prompt=ids[0].tolist())
    assert alone["choices"][0]["finish_reason"] == "length" and alone["usage"]["completion_tokens"] == 0
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == found["token_logprobs"][:length]
    for most in (0, 3):
        parts: dict[str, list] = {}
        for event in server.got(endpoint, echo=True, logprobs=2, max_tokens=most, stream=True, n=2)[:-1]:
            (told,) = json.loads(event)["choices"]
            if told["index"] == 1:
                for key, values in (told["logprobs"] or {}).items():
                    parts[key] = parts.get(key, []) + values
        assert parts["token_logprobs"] == found["token_logprobs"][: length + most]
        assert parts["text_offset"] == found["text_offset"][: length + most]


@effect("metadata", RESPONSES)
def metadata(server, endpoint):
    assert server.got(endpoint, metadata={"a": "b"})["metadata"] == {"a": "b"}


# ---- Every row of the server's table, on a running server: an effect, a refusal by its name, or nothing at all


ROWS = [(endpoint, name) for endpoint in fields.ENDPOINTS for name in fields.rows(endpoint)]


def of(treatment: str) -> list[tuple[str, str]]:
    return [row for row in ROWS if fields.rows(row[0])[row[1]].treatment == treatment]


# ---- the table itself


@pytest.mark.parametrize("endpoint", fields.ENDPOINTS, ids=row_id)
def test_the_table_has_every_field_of_the_client_and_says_which_are_not(endpoint):
    table = fields.rows(endpoint)
    assert not known(endpoint) - set(table), "fields of this client that nothing is decided about"
    assert not {name for name, field in table.items() if field.own} & known(endpoint)


def test_every_row_is_tried():
    assert set(EFFECTS) == set(of(fields.HONOURED))
    assert {name for _, name in of(fields.REFUSED)} == set(REFUSED_VALUES)
    assert {name for _, name in of(fields.HARMLESS)} == set(HARMLESS_VALUES)


# ---- honoured: an effect that is seen


@pytest.mark.parametrize(("endpoint", "name"), of(fields.HONOURED), ids=row_id)
def test_honoured(endpoint, name, server):
    EFFECTS[endpoint, name](server, endpoint)


# ---- harmless: any valid value gives the same answer

HARMLESS_VALUES = {
    "user": ("me", 7),
    "safety_identifier": ("me", 7),
    "prompt_cache_key": ("me", 7),
    "service_tier": ("auto", "priority"),
    "max_tool_calls": (3, 0),
    "parallel_tool_calls": (False, 1),
    "verbosity": ("low", "loud"),
}


@pytest.mark.parametrize(("endpoint", "name"), of(fields.HARMLESS), ids=row_id)
def test_harmless(endpoint, name, server):
    good, bad = HARMLESS_VALUES[name]
    assert server.text(endpoint, **{name: good}) == server.text(endpoint)
    assert server.refusal(endpoint, **{name: bad})["param"] == name


# ---- refused: by name; null and what asks for nothing are not

REFUSED_VALUES = {
    "suffix": "x",
    "store": True,
    "metadata": {"a": "b"},
    "previous_response_id": "resp_1",
    "conversation": "conv_1",
    "background": True,
    "background_options": {"webhook": "x"},
    "prompt": {"id": "pmpt_1"},
    "context_management": [{"type": "compaction"}],
    "truncation": "auto",
    "stream_options": {"include_obfuscation": True},
    "modalities": ["text", "audio"],
    "audio": {"voice": "x", "format": "wav"},
    "image": {"size": "x"},
    "web_search_options": {},
    "functions": [TOOL],
    "function_call": "auto",
    "moderation": {"model": "x"},
    "access_programs": {"x": 1},
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit"},
}


@pytest.mark.parametrize(("endpoint", "name"), of(fields.REFUSED), ids=row_id)
def test_refused(endpoint, name, server):
    refused = server.refusal(endpoint, **{name: REFUSED_VALUES[name]})
    assert refused["param"] == name and refused["message"].startswith(f"{name}: not served")
    for value in (None, *fields.rows(endpoint)[name].default):
        server.got(endpoint, **{LENGTH[endpoint]: 1, name: value})


@pytest.mark.parametrize("endpoint", fields.ENDPOINTS, ids=row_id)
def test_what_the_table_does_not_know_is_refused_by_name(endpoint, server):
    for name in ("best_off", "max_new_tokens", "guided_json"):
        assert server.refusal(endpoint, **{name: 1})["param"] == name
        assert server.refusal(endpoint, **{name: None})["param"] == name
    status, found = server.raw(endpoint, {"temperature": 0})
    assert status == 400 and found["error"]["param"] == fields.NEEDED[endpoint]
    for bad in (b"[]", b"{"):
        status, found = server.raw(endpoint, bad)
        assert status == 400 and found["error"]["type"] == "invalid_request_error"
