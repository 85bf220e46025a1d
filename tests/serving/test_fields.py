"""Every row of the server's table, on a running server: an effect, a refusal by its name, or nothing at all.

OpenAI's client asks where it knows the field, a bare request where it does not.
"""

from __future__ import annotations

import json
import math
import re
import socket
import sys
import threading
import time
import typing
import urllib.error
import urllib.request
from itertools import chain
from pathlib import Path

import pytest
import torch
from transformers import LogitsProcessorList

from gsd_kernels_hf import demo, generate, patch, unpatch
from gsd_kernels_hf.serving import fields
from gsd_kernels_hf.serving.fields import CHAT, COMPLETIONS, RESPONSES
from gsd_kernels_hf.serving.processors import Grammar, Grammars, Penalties

openai = pytest.importorskip("openai", reason="the server needs the extra [serving]")
pytest.importorskip("fastapi", reason="the server needs the extra [serving]")
pytest.importorskip("transformers.cli.serving.completion", reason="the server needs transformers 5.6")

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{{ bos_token }}{% if tools %}{% for t in tools %}# {{ t['function']['name'] }}\n{% endfor %}{% endif %}"
    "{% if reasoning_effort %}# effort {{ reasoning_effort }}\n{% endif %}{% if flavour %}# {{ flavour }}\n{% endif %}"
    "{% for m in messages %}{% for c in m['tool_calls'] or [] %}# calls {{ c['function']['name'] }}\n{% endfor %}"
    "{{ m['role'] ~ ' ' if m['role'] == 'system' else '' }}{{ m['content'] }}\n{% endfor %}"
)
PROMPT = "def add(a, b):\n"
ASKED = {CHAT: {"messages": [{"role": "user", "content": PROMPT}]}, COMPLETIONS: {"prompt": PROMPT}}
ASKED[RESPONSES] = {"input": PROMPT}
LENGTH = {CHAT: "max_tokens", COMPLETIONS: "max_tokens", RESPONSES: "max_output_tokens"}
TOOL = {
    "name": "paint",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": TOOL}]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["list", "dict"]}, "full": {"type": "boolean"}},
    "required": ["kind", "full"],
    "additionalProperties": False,
}


class Server:
    """The demo pair, or its target alone without speculation, served from a thread of this process."""

    def __init__(self, speculates: bool = True) -> None:
        import uvicorn

        from gsd_kernels_hf.serving.server import make_app

        self.target, draft, self.tokenizer = demo.load()
        self.tokenizer.chat_template = TEMPLATE
        drafting = {"assistant_model": draft} if speculates else {"graph_config": "plain"}
        handle = patch(self.target, tokenizer=self.tokenizer, **drafting)
        app = make_app("small", handle, self.tokenizer, speculates=speculates)
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        unpatch(self.target)

    def raw(self, endpoint: str, body: object) -> tuple[int, typing.Any]:
        """Status and body of a bare request; a list of events for a stream."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + endpoint, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        if text.startswith("data: "):
            return status, [part.removeprefix("data: ") for part in text.split("\n\n") if part]
        return status, json.loads(text)

    def ask(self, endpoint: str, **named: typing.Any) -> tuple[int, typing.Any]:
        """Status and body of a short greedy request with some fields, by OpenAI's client where it has them all."""
        body = {"model": "small", "temperature": 0, LENGTH[endpoint]: 8, **ASKED[endpoint], **named}
        body = {key: value for key, value in body.items() if value is not ...}
        if set(body) <= known(endpoint):
            create = {CHAT: self.client.chat.completions, COMPLETIONS: self.client.completions}
            try:
                answer = create.get(endpoint, self.client.responses).create(**body)
            except openai.APIStatusError as error:
                return error.status_code, {"error": error.body}
            if body.get("stream") is not True:
                return 200, answer.model_dump(mode="json")
            events = [event.model_dump_json(exclude_unset=True) for event in answer]
            return 200, [*events, "[DONE]"] if endpoint != RESPONSES else events
        return self.raw(endpoint, body)

    def got(self, endpoint: str, **named: typing.Any) -> typing.Any:
        """The body of a request that is served."""
        status, found = self.ask(endpoint, **named)
        assert status == 200, found
        return found

    def text(self, endpoint: str, **named: typing.Any) -> str:
        """The text of a request that is served."""
        found = self.got(endpoint, **named)
        if endpoint == RESPONSES:
            return found["output"][-1]["content"][0]["text"]
        return found["choices"][0]["message"]["content"] if endpoint == CHAT else found["choices"][0]["text"]

    def refusal(self, endpoint: str, **named: typing.Any) -> dict[str, typing.Any]:
        """The error of a request that is refused."""
        status, found = self.ask(endpoint, **named)
        assert status == 400, found
        assert found["error"]["type"] == "invalid_request_error" and found["error"]["message"]
        return found["error"]


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.stop()


def known(endpoint: str) -> set[str]:
    """The fields that the installed client has."""
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import response_create_params as responses

    kinds = {
        CHAT: (chat.CompletionCreateParamsStreaming, chat.CompletionCreateParamsNonStreaming),
        COMPLETIONS: (completions.CompletionCreateParamsStreaming, completions.CompletionCreateParamsNonStreaming),
        RESPONSES: (responses.ResponseCreateParamsStreaming, responses.ResponseCreateParamsNonStreaming),
    }[endpoint]
    return {name for kind in kinds for name in typing.get_type_hints(kind)}


ROWS = [(endpoint, name) for endpoint in fields.ENDPOINTS for name in fields.rows(endpoint)]


def of(treatment: str) -> list[tuple[str, str]]:
    return [row for row in ROWS if fields.rows(row[0])[row[1]].treatment == treatment]


def row_id(value: str) -> str:
    return value.rpartition("/v1/")[2]


# ---- the table itself


@pytest.mark.parametrize("endpoint", fields.ENDPOINTS, ids=row_id)
def test_the_table_has_every_field_of_the_client_and_says_which_are_not(endpoint):
    table = fields.rows(endpoint)
    assert not known(endpoint) - set(table), "fields of this client that nothing is decided about"
    assert not {name for name, field in table.items() if field.own} & known(endpoint)


def test_the_page_is_what_the_table_says():
    page = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- fields -->\n(.*)<!-- /fields -->", page, re.DOTALL)
    assert found and found[1].strip() == fields.table().strip(), "python docs/write_api.py"


def test_every_row_is_tried():
    assert set(EFFECTS) == set(of(fields.HONOURED))
    assert {name for _, name in of(fields.REFUSED)} == set(REFUSED_VALUES)
    assert {name for _, name in of(fields.HARMLESS)} == set(HARMLESS_VALUES)


# ---- honoured: an effect that is seen

EFFECTS: dict[tuple[str, str], typing.Callable[[Server, str], None]] = {}


def effect(name: str, *endpoints: str):
    def keep(test):
        EFFECTS.update({(endpoint, name): test for endpoint in endpoints or fields.ENDPOINTS})
        return test

    return keep


@pytest.mark.parametrize(("endpoint", "name"), of(fields.HONOURED), ids=row_id)
def test_honoured(endpoint, name, server):
    EFFECTS[endpoint, name](server, endpoint)


@effect("model")
def model(server, endpoint):
    assert server.got(endpoint)["model"] == "small"
    assert server.refusal(endpoint, model="other")["param"] == "model"


@effect("messages", CHAT)
def messages(server, endpoint):
    two = [{"role": "user", "content": "import os"}, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]
    assert server.got(endpoint, messages=two)["usage"]["prompt_tokens"] == tokens(server, "import os\nx\n")
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    for content, place in (([image], "[0].content[0]"), (7, "[0].content")):
        refused = server.refusal(endpoint, messages=[{"role": "user", "content": content}])
        assert refused["param"] == f"messages{place}"
    assert server.refusal(endpoint, messages=[])["param"] == "messages"
    assert server.refusal(endpoint, messages=[{"role": "judge", "content": ""}])["param"] == "messages[0].role"


def tokens(server, text: str) -> int:
    return len(server.tokenizer(text)["input_ids"])


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
    for bad in ([], [PROMPT, 3], [[1, "x"]], [10**6], {"a": 1}, [[]], True):
        assert re.match(r"prompt(\[\d\])?$", server.refusal(endpoint, prompt=bad)["param"])


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
    image = {"type": "input_image", "image_url": "data:,"}
    assert server.refusal(endpoint, input=[{"role": "user", "content": [image]}])["param"] == "input[0].content[0]"
    for kind in ("item_reference", ["message"]):
        assert server.refusal(endpoint, input=[{"type": kind, "id": "1"}])["param"] == "input[0].type"


@effect("instructions", RESPONSES)
def instructions(server, endpoint):
    spoken = [{"role": "developer", "content": "import re"}, {"role": "user", "content": PROMPT}]
    found = server.got(endpoint, instructions="import os", input=spoken)
    both = "system import os\nsystem import re\n" + PROMPT + "\n"
    assert found["usage"]["input_tokens"] == tokens(server, both)
    found = server.got(endpoint, instructions="import os")
    assert found["usage"]["input_tokens"] == tokens(server, "system import os\n" + PROMPT + "\n")
    assert found["instructions"] == "import os"


@effect("tools", CHAT, RESPONSES)
def tools(server, endpoint):
    flat = [{"type": "function", "strict": None, **TOOL}]
    usage = server.got(endpoint, tools=TOOLS if endpoint == CHAT else flat)["usage"]
    assert next(iter(usage.values())) == tokens(server, "# paint\n" + PROMPT + "\n") or usage["total_tokens"] == (
        tokens(server, "# paint\n" + PROMPT + "\n") + 8
    )
    assert server.refusal(endpoint, tools=[{"type": "web_search"}])["param"] == "tools[0].type"


@effect("tool_choice", CHAT)
def tool_choice(server, endpoint):
    plain, shown = server.text(endpoint), server.text(endpoint, tools=TOOLS)
    assert server.text(endpoint, tools=TOOLS, tool_choice="none") == plain != shown
    assert server.text(endpoint, tools=TOOLS, tool_choice="auto") == shown
    pytest.importorskip("xgrammar")
    named = {"type": "function", "function": {"name": "paint"}}
    for choice in ("required", named):
        found = server.got(endpoint, tools=TOOLS, tool_choice=choice, max_tokens=64)["choices"][0]
        call = found["message"]["tool_calls"][0]["function"]
        assert (found["finish_reason"], call["name"], found["message"]["content"]) == ("tool_calls", "paint", None)
        assert json.loads(call["arguments"])["colour"] in ("red", "blue")
        events = server.got(endpoint, tools=TOOLS, tool_choice=choice, max_tokens=64, stream=True)
        told, last = (json.loads(event)["choices"][0] for event in events[-3:-1])
        assert told["delta"]["tool_calls"][0]["function"] == call and last["finish_reason"] == "tool_calls"
    assert server.refusal(endpoint, tool_choice="required")["param"] == "tool_choice"
    named["function"]["name"] = "sing"
    assert server.refusal(endpoint, tools=TOOLS, tool_choice=named)["param"] == "tool_choice"


@effect("tool_choice", RESPONSES)
def tool_choice_of_responses(server, endpoint):
    flat = [{"type": "function", "strict": None, **TOOL}]
    assert server.text(endpoint, tools=flat, tool_choice="none") == server.text(endpoint)
    assert server.text(endpoint, tools=flat, tool_choice="auto") != server.text(endpoint)
    pytest.importorskip("xgrammar")
    for choice in ("required", {"type": "function", "name": "paint"}):
        found = server.got(endpoint, tools=flat, tool_choice=choice, max_output_tokens=64)
        call = found["output"][-1]
        assert (call["type"], call["name"], found["status"]) == ("function_call", "paint", "completed")
        assert json.loads(call["arguments"])["colour"] in ("red", "blue")
        events = server.got(endpoint, tools=flat, tool_choice=choice, max_output_tokens=64, stream=True)
        last = json.loads(events[-1])["response"]["output"][-1]
        assert (last["name"], last["arguments"]) == ("paint", call["arguments"])
    assert server.refusal(endpoint, tool_choice="required")["param"] == "tool_choice"


@effect("parallel_tool_calls", CHAT, RESPONSES)
def parallel_tool_calls(server, endpoint):
    shown = TOOLS if endpoint == CHAT else [{"type": "function", "strict": None, **TOOL}]
    assert server.refusal(endpoint, tools=shown, parallel_tool_calls=False)["param"] == "parallel_tool_calls"
    server.got(endpoint, parallel_tool_calls=False)
    server.got(endpoint, tools=shown, parallel_tool_calls=True)


@effect("chat_template_kwargs", CHAT, RESPONSES)
def chat_template_kwargs(server, endpoint):
    plain, other = server.got(endpoint), server.got(endpoint, chat_template_kwargs={"flavour": "sweet"})
    assert other["usage"]["total_tokens"] - plain["usage"]["total_tokens"] == tokens(server, "# sweet\n") - tokens(
        server, ""
    )
    for bad in ("taste", "messages", "tools", "tokenize"):  # unread, or the server's own
        refused = server.refusal(endpoint, chat_template_kwargs={bad: "sweet"})
        assert refused["param"] == f"chat_template_kwargs.{bad}"


@effect("reasoning_effort", CHAT)
def reasoning_effort(server, endpoint):
    assert server.got(endpoint, reasoning_effort="low")["usage"]["prompt_tokens"] > tokens(server, PROMPT + "\n")


@effect("reasoning", RESPONSES)
def reasoning(server, endpoint):
    found = server.got(endpoint, reasoning={"effort": "low"})
    assert found["usage"]["input_tokens"] > tokens(server, PROMPT + "\n")
    assert server.refusal(endpoint, reasoning={"summary": "auto"})["param"] == "reasoning.summary"


@effect("temperature")
def temperature(server, endpoint):
    greedy = server.text(endpoint, temperature=...)
    assert server.text(endpoint, temperature=0) == greedy
    assert len({server.text(endpoint, temperature=2) for _ in range(3)}) > 1
    assert server.refusal(endpoint, temperature=3)["param"] == "temperature"
    for bad in ("hot", True, 10**400):
        assert server.refusal(endpoint, temperature=bad)["param"] == "temperature"


def narrowed(name: str, narrow: float, wide: float, bad: float):
    def test(server, endpoint):
        assert server.text(endpoint, temperature=2, **{name: narrow}) == server.text(endpoint)
        long = {LENGTH[endpoint]: 24, "temperature": ..., name: wide}
        assert len({server.text(endpoint, **long) for _ in range(3)}) > 1, "it samples without a temperature"
        assert server.refusal(endpoint, **{name: bad})["param"] == name

    effect(name)(test)


narrowed("top_p", 1e-6, 0.999, 1.5)
narrowed("top_k", 1, 0, -2)
narrowed("min_p", 1.0, 0.001, -1)


def test_a_top_k_beyond_all_integers_is_off(server):
    named = {"temperature": 1.5, "seed": 3}
    assert server.text(CHAT, top_k=10**30, **named) == server.text(CHAT, top_k=0, **named)


@effect("seed")
def seed(server, endpoint):
    first, second = (server.text(endpoint, temperature=2, seed=number) for number in (1, 2))
    assert server.text(endpoint, temperature=2, seed=1) == first != second
    assert server.refusal(endpoint, seed=2**80)["param"] == "seed"
    assert server.refusal(endpoint, seed=1.5)["param"] == "seed"


@effect("frequency_penalty", CHAT, COMPLETIONS)
def frequency_penalty(server, endpoint):
    penalised(server, endpoint, "frequency_penalty")


@effect("presence_penalty", CHAT, COMPLETIONS)
def presence_penalty(server, endpoint):
    penalised(server, endpoint, "presence_penalty")


def penalised(server, endpoint, name) -> None:
    """As OpenAI defines it, token by token, of the bare model's logits; sampled, as without a draft."""
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
    sampled = server.text(endpoint, max_tokens=16, temperature=1, seed=3, **{name: 1.5}, **shown)
    amounts = (1.5, 0.0) if name == "frequency_penalty" else (0.0, 1.5)
    out = generate(
        server.target,
        ids[:, :start],
        logits_processor=LogitsProcessorList([Penalties(start, *amounts)]),
        max_new_tokens=16,
        do_sample=True,
        temperature=1.0,
        seed=3,
    )
    assert sampled == server.tokenizer.decode(out[0, start:])
    assert server.refusal(endpoint, **{name: 2.5})["param"] == name


@effect("repetition_penalty")
def repetition_penalty(server, endpoint):
    assert server.text(endpoint, repetition_penalty=5.0) != server.text(endpoint)
    assert server.refusal(endpoint, repetition_penalty=0)["param"] == "repetition_penalty"


@effect("logit_bias", CHAT, COMPLETIONS)
def logit_bias(server, endpoint):
    token = server.tokenizer(" x", add_special_tokens=False)["input_ids"][0]
    assert server.text(endpoint, logit_bias={str(token): 100}).count(server.tokenizer.decode([token])) == 8
    assert server.text(endpoint, logit_bias={}) == server.text(endpoint)
    for bad, place in (({"x": 1}, ""), ({"1000000": 1}, ""), ({"5": 101}, ".5"), ([1], ""), ({"5": "1"}, ".5")):
        assert server.refusal(endpoint, logit_bias=bad)["param"] == f"logit_bias{place}"


@effect("response_format", CHAT)
def response_format(server, endpoint):
    assert server.text(endpoint, response_format={"type": "text"}) == server.text(endpoint)
    pytest.importorskip("xgrammar")
    form = {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA, "strict": True}}
    check_json(server, endpoint, response_format=form)
    assert server.text(endpoint, response_format={"type": "json_object"}).startswith("{")
    form["json_schema"]["schema"] = {"type": "nonsense"}
    assert server.refusal(endpoint, response_format=form)["param"].startswith("response_format")
    assert server.refusal(endpoint, response_format={"type": "yaml"})["param"] == "response_format.type"
    assert server.refusal(endpoint, tools=TOOLS, response_format={"type": "json_object"})["param"] == "response_format"


def check_json(server, endpoint, **form) -> None:
    for sampled in ({"temperature": 0}, {"temperature": 1.5, "seed": 5}):
        text = server.text(endpoint, **{LENGTH[endpoint]: 64}, **sampled, **form)
        found = json.loads(text)
        assert set(found) == {"kind", "full"} and found["kind"] in ("list", "dict") and isinstance(found["full"], bool)
    ids = server.tokenizer(PROMPT + "\n", return_tensors="pt")["input_ids"]
    compiled = Grammars(server.tokenizer, server.target.config.vocab_size).of(SCHEMA, "schema", [2])
    bare = LogitsProcessorList([Grammar(compiled, ids.shape[1])])
    options = {"max_new_tokens": 64, "do_sample": True, "temperature": 1.5, "seed": 5}
    out = generate(server.target, ids, logits_processor=bare, tokenizer=server.tokenizer, **options)
    assert server.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == text, "as without a draft"


@effect("text", RESPONSES)
def text(server, endpoint):
    assert server.text(endpoint, text={"format": {"type": "text"}}) == server.text(endpoint)
    assert server.refusal(endpoint, text={"verbosity": "low"})["param"] == "text.verbosity"
    assert server.refusal(endpoint, text={"format": {"type": "yaml"}})["param"] == "text.format.type"
    pytest.importorskip("xgrammar")
    check_json(server, endpoint, text={"format": {"type": "json_schema", "name": "one", "schema": SCHEMA}})


@effect("generation_config")
def generation_config(server, endpoint):
    given = json.dumps({"max_new_tokens": 3, "transformers_version": "5", "num_beams": 1})
    found = server.got(endpoint, generation_config=given, **{LENGTH[endpoint]: ...})
    assert found["gsd_kernels"]["new_tokens"] == 3
    for bad in ("num_beams", "num_assistant_tokens", "unheard_of", "num_return_sequences"):
        refused = server.refusal(endpoint, generation_config=json.dumps({bad: 3}))
        assert refused["param"] == f"generation_config.{bad}"
    assert server.refusal(endpoint, generation_config="{")["param"] == "generation_config"


def test_what_a_generation_config_holds_is_honoured_or_refused_by_name(server):
    for bad in (
        {"temperature": 0.7},  # the request has 0
        {"eos_token_id": "x"},
        {"max_new_tokens": -5},
        {"max_new_tokens": 5},  # the request has max_tokens
        {"repetition_penalty": 3.0},  # and repetition_penalty
        {"do_sample": True},  # and temperature 0
    ):
        refused = server.refusal(COMPLETIONS, generation_config=json.dumps(bad), repetition_penalty=2)
        assert refused["param"] == f"generation_config.{list(bad)[-1]}", refused
    for bad in ({"do_sample": True, "temperature": -1}, {"temperature": 0.7}):  # which is nothing without do_sample
        refused = server.refusal(COMPLETIONS, temperature=..., generation_config=json.dumps(bad))
        assert refused["param"] == "generation_config.temperature"
    for bad in ({"stop_strings": 5}, {"sequence_bias": 5}, {"watermarking_config": {}}):
        for stream in (False, True):
            refused = server.refusal(COMPLETIONS, generation_config=json.dumps(bad), stream=stream)
            assert refused["param"].startswith("generation_config")
    given = json.dumps({"max_new_tokens": 8, "do_sample": False})
    assert server.text(COMPLETIONS, generation_config=given) == server.text(COMPLETIONS)


@pytest.mark.parametrize("endpoint", fields.ENDPOINTS, ids=row_id)
def test_a_stream_is_refused_with_a_status_as_well(endpoint, server):
    assert server.refusal(endpoint, stream=True, top_p=7)["param"] == "top_p"
    long = {"prompt": [5] * 2048} if endpoint == COMPLETIONS else {fields.NEEDED[endpoint]: spoken(server, 2048)}
    assert server.refusal(endpoint, stream=True, **{LENGTH[endpoint]: ..., **long})["param"] == fields.NEEDED[endpoint]
    refused = server.refusal(endpoint, stream=True, generation_config='{"bad_words_ids": 5}')
    assert refused["param"].startswith("generation_config")


@effect("max_tokens", CHAT, COMPLETIONS)
@effect("max_completion_tokens", CHAT)
def length(server, endpoint, names=("max_tokens", "max_completion_tokens")):
    for name in names[: 2 if endpoint == CHAT else 1]:
        found = server.got(endpoint, **{"max_tokens": ..., name: 3})
        assert found["usage"]["completion_tokens"] == 3 and found["choices"][0]["finish_reason"] == "length"
        for bad in (0, 2**31, 2.5, True):
            assert server.refusal(endpoint, **{"max_tokens": ..., name: bad})["param"] == name
    if endpoint == CHAT:
        assert server.refusal(endpoint, max_tokens=3, max_completion_tokens=4)["param"] == "max_tokens"


@effect("max_output_tokens", RESPONSES)
def max_output_tokens(server, endpoint):
    found = server.got(endpoint, max_output_tokens=3)
    assert found["usage"]["output_tokens"] == 3 and found["status"] == "incomplete"
    for bad in (0, 2**31, 2.5, True):
        assert server.refusal(endpoint, max_output_tokens=bad)["param"] == "max_output_tokens"


def spoken(server, count: int) -> list[dict[str, str]]:
    """A message of the chat template that makes a prompt of so many tokens."""
    message = {"role": "user", "content": ""}
    for more in range(8):
        message["content"] = " x" * (count - more)
        if len(server.tokenizer.apply_chat_template([message])["input_ids"]) == count:
            return [message]
    raise AssertionError(count)


@pytest.mark.parametrize("endpoint", fields.ENDPOINTS, ids=row_id)
def test_a_length_that_is_named_goes_beyond_the_positions_and_no_other(endpoint, server, caplog):
    positions, needed = server.target.config.max_position_embeddings, fields.NEEDED[endpoint]

    def usage(count: int, **named: object) -> int:
        given = [5] * count if endpoint == COMPLETIONS else spoken(server, count)
        found = server.got(endpoint, **{needed: given, LENGTH[endpoint]: ..., **named})["usage"]
        return found["total_tokens"] - count

    assert usage(positions - 3) == 3
    assert not any("positions" in line for line in caplog.messages)
    assert usage(positions - 3, **{LENGTH[endpoint]: 8}) == 8 and usage(positions + 1, **{LENGTH[endpoint]: 2}) == 2
    assert any(f"beyond the {positions} positions" in line for line in caplog.messages)
    if endpoint != RESPONSES:  # which has no stop strings
        whole = server.got(endpoint, max_tokens=2**31 - 1, stop=server.text(endpoint).split()[0])
        assert whole["choices"][0]["finish_reason"] == "stop"


@effect("stop", CHAT, COMPLETIONS)
def stop(server, endpoint):
    whole = server.text(endpoint)
    word = whole.split()[0]
    for given in (word, ["nowhere", word]):
        found = server.got(endpoint, stop=given)
        assert found["choices"][0]["finish_reason"] == "stop" and found["usage"]["completion_tokens"] < 8
    assert server.text(endpoint, stop=[]) == whole
    for bad in ("", [""], 7, [7], ["x"] * 17):
        assert server.refusal(endpoint, stop=bad)["param"] == "stop"


@effect("n", CHAT, COMPLETIONS)
def n(server, endpoint):
    found = server.got(endpoint, n=2, temperature=2, seed=4)
    alone = [server.got(endpoint, temperature=2, seed=number)["choices"][0] for number in (4, 5)]
    keys = ("message", "text")
    assert [[c.get(k) for k in keys] for c in found["choices"]] == [[c.get(k) for k in keys] for c in alone]
    assert found["usage"]["completion_tokens"] == 16
    pieces: dict[int, str] = {0: "", 1: ""}
    for event in server.got(endpoint, n=2, temperature=2, seed=4, stream=True)[:-1]:
        (choice,) = json.loads(event)["choices"]
        pieces[choice["index"]] += choice["text"] if endpoint == COMPLETIONS else choice["delta"].get("content") or ""
    assert list(pieces.values()) == [c["text"] if endpoint == COMPLETIONS else c["message"]["content"] for c in alone]
    assert server.refusal(endpoint, n=0)["param"] == "n"


@effect("best_of", COMPLETIONS)
def best_of(server, endpoint):
    assert len(server.got(endpoint, n=2, best_of=2)["choices"]) == 2
    assert server.refusal(endpoint, best_of=2)["param"] == "best_of"


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
    assert server.refusal(endpoint, prediction={"type": "file", "content": "x"})["param"] == "prediction.type"
    for part in ({"type": "text"}, {"type": "text", "text": 5}):
        refused = server.refusal(endpoint, prediction={"type": "content", "content": [part]})
        assert refused["param"] == "prediction.content[0].text"


@effect("stream")
def stream(server, endpoint):
    events = server.got(endpoint, stream=True)
    if endpoint == RESPONSES:
        found = [json.loads(event) for event in events]
        text = "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
        assert found[-1]["type"] == "response.incomplete"
        response = found[-1]["response"]
        assert response["gsd_kernels"]["new_tokens"] == response["usage"]["output_tokens"] == 8
    else:
        found = [json.loads(event)["choices"][0] for event in events[:-1]]
        text = "".join(c["text"] if endpoint == COMPLETIONS else c["delta"].get("content") or "" for c in found)
        assert events[-1] == "[DONE]" and [c["finish_reason"] for c in found if c["finish_reason"]] == ["length"]
        assert json.loads(events[-2])["gsd_kernels"]["new_tokens"] == 8
    assert text == server.text(endpoint) == server.text(endpoint, stream=False)
    assert server.refusal(endpoint, stream="yes")["param"] == "stream"


@effect("stream_options", CHAT, COMPLETIONS)
def stream_options(server, endpoint):
    def events(**options):
        return [json.loads(e) for e in server.got(endpoint, stream=True, stream_options=options)[:-1]]

    with_usage, without = events(include_usage=True), events(include_usage=False, include_obfuscation=False)
    assert with_usage[-1]["choices"] == [] and with_usage[-1]["usage"]["completion_tokens"] == 8
    assert not any(event.get("usage") for event in [*with_usage[:-1], *without])
    assert server.refusal(endpoint, stream_options={"include_usage": True})["param"] == "stream_options"
    refused = server.refusal(endpoint, stream=True, stream_options={"include_obfuscation": True})
    assert refused["param"] == "stream_options.include_obfuscation"


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
        assert server.refusal(endpoint, top_logprobs=2)["param"] == "top_logprobs"
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
    assert server.refusal(endpoint, logprobs="yes")["param"] == "logprobs"


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
    assert server.refusal(endpoint, top_logprobs=2)["param"] == "top_logprobs"
    assert server.refusal(endpoint, include=["reasoning.encrypted_content"])["param"] == "include"
    assert not server.got(endpoint, include=[])["output"][0]["content"][0].get("logprobs")


@effect("echo", COMPLETIONS)
def echo(server, endpoint):
    whole = PROMPT + server.text(endpoint)
    assert server.text(endpoint, echo=True) == whole
    events = server.got(endpoint, echo=True, stream=True)[:-1]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole
    assert server.refusal(endpoint, echo=True, logprobs=1)["param"] == "echo"


@effect("metadata", RESPONSES)
def metadata(server, endpoint):
    assert server.got(endpoint, metadata={"a": "b"})["metadata"] == {"a": "b"}


# ---- harmless: any valid value gives the same answer

HARMLESS_VALUES = {
    "user": ("me", 7),
    "safety_identifier": ("me", 7),
    "prompt_cache_key": ("me", 7),
    "service_tier": ("auto", "priority"),
    "max_tool_calls": (3, 0),
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
    "verbosity": "low",
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


# ---- beside the table


def test_a_prediction_drafts_where_the_server_decodes_plainly():
    server = Server(speculates=False)
    try:
        named = {"max_tokens": 48, "temperature": 2, "seed": 11}
        plain = server.got(CHAT, **named)
        text = plain["choices"][0]["message"]["content"]
        drafted = server.got(CHAT, prediction={"type": "content", "content": PROMPT + text}, **named)
        again = server.got(CHAT, **named)
    finally:
        server.stop()
    assert text == drafted["choices"][0]["message"]["content"] == again["choices"][0]["message"]["content"]
    assert plain["gsd_kernels"]["tokens_per_step"] == again["gsd_kernels"]["tokens_per_step"] == 1
    assert drafted["gsd_kernels"]["tokens_per_step"] > 1


def test_without_xgrammar_the_extra_is_named(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    refused = server.refusal(CHAT, response_format={"type": "json_object"})
    assert refused["param"] == "response_format" and "gsd-kernels[grammar]" in refused["message"]


def test_an_answer_can_be_handed_back(server):
    said = server.got(CHAT)["choices"][0]["message"]
    server.got(CHAT, messages=[*ASKED[CHAT]["messages"], said, {"role": "user", "content": "x"}])
    output = server.got(RESPONSES)["output"]
    server.got(RESPONSES, input=[{"role": "user", "content": PROMPT}, *output, {"role": "user", "content": "x"}])


def test_the_fields_of_a_message_are_named_where_they_would_be_dropped(server):
    one = {"role": "user", "content": PROMPT, "audio": {"id": "1"}}
    assert server.refusal(CHAT, messages=[one])["param"] == "messages[0].audio"
    described = {"type": "json_schema", "json_schema": {"name": "one", "description": "x", "schema": SCHEMA}}
    refused = server.refusal(CHAT, response_format=described)
    assert refused["param"] == "response_format.json_schema.description"
    named = {"role": "user", "content": PROMPT, "name": "ann"}  # which the template does not show
    assert server.refusal(CHAT, messages=[named])["param"] == "messages[0].name"
    assert server.refusal(RESPONSES, input=[named])["param"] == "input[0].name"
    loose = {"type": "json_object", "schema": SCHEMA}
    assert server.refusal(CHAT, response_format=loose)["param"] == "response_format.schema"
    assert server.refusal(RESPONSES, text={"format": loose})["param"] == "text.format.schema"
    assert server.refusal(CHAT, tools=[{**TOOLS[0], "cached": 1}])["param"] == "tools[0].cached"
    strict = [{"type": "function", "function": {**TOOL, "strict": True}}]
    assert server.refusal(CHAT, tools=strict)["param"] == "tools[0].function.strict"


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_tokens_are_told_by_their_bytes(kind):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from gsd_kernels_hf.serving.logprobs import Pieces

    if kind == "bytes":
        vocabulary = {"\u0120a": 0, "\u00c3": 1, "\u00a9": 2, "<s>": 3}
        inner = Tokenizer(models.BPE(vocabulary, []))
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    else:
        vocabulary = {"\u2581a": 0, "<0xC3>": 1, "<0xA9>": 2, "<s>": 3}
        inner = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        inner.decoder = decoders.Sequence(steps)
    pieces = Pieces(PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>"))
    assert [pieces.bytes_of(token) for token in range(5)] == [b" a", b"\xc3", b"\xa9", b"<s>", b""]
    assert [pieces.text_of(token) for token in range(3)] == [" a", "bytes:\\xc3", "bytes:\\xa9"]
