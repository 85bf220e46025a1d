"""The server to its clients: a process of the command, what OpenAI's clients send of their own accord, other routes."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import typing
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from served import ASKED, PROMPT, QWEN, TOOL, TOOLS, Server, known, row_id
from typer.testing import CliRunner

from gsd_kernels_cli import demo
from gsd_kernels_cli.app import app
from gsd_kernels_serve import fields
from gsd_kernels_serve.fields import CHAT, COMPLETIONS, RESPONSES
from gsd_kernels_serve.texts import Completions

pytestmark = [pytest.mark.long, pytest.mark.slow]


# ---- ``gsd-kernels serve`` as a process: one, which all tests ask, and which the last one interrupts


LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Process:
    """The demo pair, served by a process that writes a log."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "log"
        models = [str(demo.path() / "target"), "--draft", str(demo.path() / "draft"), "--dtype", "float32"]
        options = ["--name", "small", "--max-prompt", "400000", "--port", "0"]
        with open(self.file, "w") as log:
            command = [sys.executable, "-m", "gsd_kernels_hf", "serve", *models, *options]
            self.process = subprocess.Popen(command, stderr=log, stdout=log)
        self.url = self.wait_for(r"at (http://127\.0\.0\.1:\S+)/v1;")[1]

    @property
    def log(self) -> str:
        return self.file.read_text()

    def wait_for(self, pattern: str) -> re.Match:
        until = time.monotonic() + 120
        while time.monotonic() < until and self.process.poll() is None:
            if found := re.search(pattern, self.log):
                return found
            time.sleep(0.05)
        raise AssertionError(f"no {pattern} in the log:\n{self.log}")

    def ask(self, path: str, body: object = None, **headers: str) -> tuple[int, dict]:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(asked, timeout=120) as answer:
                return answer.status, json.loads(answer.read().decode().removeprefix("data: "))
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    process = Process(tmp_path_factory.mktemp("serve"))
    yield process
    process.process.kill()


def test_what_is_served_is_told_and_every_text_is_in_the_log(process):
    assert process.ask("/health") == (200, {"status": "ok"})
    assert [model["id"] for model in process.ask("/v1/models")[1]["data"]] == ["small"]
    assert process.ask("/load_model", {"model": "small"})[1]["status"] == "ready"
    expected = {"status": "error", "model": "other@main", "message": "only small is served"}
    assert process.ask("/load_model", {"model": "other"})[1] == expected
    status, found = process.ask(COMPLETIONS, {**ASKED[COMPLETIONS], "max_tokens": 24, "temperature": 0})
    statistics = found["gsd_kernels"]
    assert status == 200 and statistics["new_tokens"] == 24 and statistics["queued"] >= 0
    process.wait_for(rf"{found['id']}: 9 \+ 24 tokens, {statistics['steps']} steps")


def test_other_names_of_this_machine_are_refused(process):
    from gsd_kernels_serve.door import host_of
    from gsd_kernels_serve.listen import names_of

    for name, status in (("evil.example", 400), ("localhost", 200), ("127.0.0.1:1", 200)):
        found, body = process.ask("/v1/models", Host=name)
        assert found == status and (status == 200 or "--allowed-host" in body["error"]["message"]), name
    assert names_of("0.0.0.0", []) is None and names_of("0.0.0.0", ["box"]) == [*LOOPBACK, "0.0.0.0", "box"]
    assert names_of("127.0.0.1", []) == [*LOOPBACK, "127.0.0.1"]
    for given, name in (("LocalHost:80", "localhost"), ("[::1]:80", "::1"), ("a.b.", "a.b"), ("", "")):
        assert host_of({"headers": [(b"host", given.encode())]}) == name


def test_memory_stays_flat_over_requests(process):
    def resident() -> int:
        status = Path(f"/proc/{process.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1])

    for number in range(120):
        if number == 60:
            before = resident()
        prompt = f"# {number % 8}\n{PROMPT}" * (1 + number % 3)
        assert process.ask(COMPLETIONS, {"prompt": prompt, "max_tokens": 3, "temperature": 0})[0] == 200
    assert resident() - before < 6 * 1024, (before, resident())


def test_an_interrupt_while_a_prompt_is_read_ends_it_cleanly(process):
    """Last, as it ends the process; a text that is being decoded is one of ``test_crowd``."""

    def ask() -> None:
        with contextlib.suppress(OSError):  # the connection ends, or there is time for an answer
            assert process.ask(COMPLETIONS, {"prompt": [5] * 300_000, "max_tokens": 1})[0] == 503

    waiting = threading.Thread(target=ask)
    waiting.start()
    time.sleep(1.5)  # it is being read, for minutes
    process.process.send_signal(signal.SIGINT)
    assert process.process.wait(60) == 130, process.log
    waiting.join(10)
    assert not waiting.is_alive()
    assert "Traceback" not in process.log and process.log.rstrip().endswith("gsd-kernels: interrupted")
    assert not re.search("torchao|_pytree", process.log), "unused packages speak up when they are imported"


# ---- what is refused before a model is loaded


def test_a_port_in_use_and_a_bad_model_are_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = CliRunner().invoke(app, ["serve", "--port", str(other.getsockname()[1])])
    assert result.exit_code == 1
    assert re.search(r"error: --host, --port: 127.0.0.1:\d+ cannot be opened: address already in use", result.stderr)
    result = CliRunner().invoke(app, ["serve", str(tmp_path / "none"), "--port", "0"])
    assert result.exit_code == 2 and "no such folder" in result.stderr


def test_other_transformers_are_refused_by_name(monkeypatch):
    import transformers

    from gsd_kernels_serve.installed import check_installed

    check_installed()
    monkeypatch.setattr(transformers, "__version__", "5.14.1")
    with pytest.raises(ImportError, match=r"transformers 5\.15 or newer.*5\.14\.1"):
        check_installed()


# ---- What OpenAI's clients send of their own accord is served: requests as they were recorded, and every nested field


RECORDED = json.loads(Path(__file__).with_name("clients.json").read_text(encoding="utf-8"))
"""First requests of langchain-openai 1.7, pydantic-ai 2.68, openai-agents, llama-index-llms-openai-like 0.8, lm-eval
0.4.13 and openai 3.57, with what they add by default: to a message, tools, a type to answer with."""

STRICT = [{"type": "function", "function": {**TOOL, "strict": True}}]


@pytest.mark.parametrize("name", RECORDED)
def test_a_first_request_is_served(name, server):
    endpoint, body = RECORDED[name]["endpoint"], RECORDED[name]["body"]
    if "response_format" in body or "text" in body or body.get("tool_choice") == "required":
        pytest.importorskip("xgrammar")
    length = "max_output_tokens" if endpoint == RESPONSES else "max_tokens"
    status, found = server.raw(endpoint, {length: 4, **body})
    assert status == 200, found
    if body.get("logprobs") and body.get("echo"):
        for choice, prompt in zip(found["choices"], body["prompt"], strict=True):
            assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1


# ---- strict tools beside tool_choice auto


@pytest.fixture
def calling(server, monkeypatch):
    """The model is one whose calls transformers knows."""
    monkeypatch.setattr(server.tokenizer, "response_template", QWEN, raising=False)
    return server


def test_calls_of_strict_tools_are_held_to_their_schema_and_text_is_free(calling):
    pytest.importorskip("xgrammar")
    assert calling.text(CHAT, tools=STRICT) == calling.text(CHAT, tools=TOOLS), "no call: the text is free"
    held = marked([*STRICT, {"type": "function", "function": {"name": "sing"}}], calling, QWEN)
    for text, good in (
        ("hello <b>", True),
        ('x <tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>', True),
        ('<tool_call>{"name": "sing", "arguments": {"anything": [1]}}</tool_call> bye', True),
        ('<tool_call>\n{"name": "paint", "arguments": {"colour": "green"}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "paint", "arguments": {}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "dance", "arguments": {}}\n</tool_call>', False),
    ):
        assert held(text) == good, text
    pattern = r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>"
    held = marked(STRICT, calling, {"fields": {"tool_calls": {"open_pattern": pattern, "content": "xml-inline"}}})
    call = "<tool_call>\n<function=paint>\n<parameter=colour>\n%s\n</parameter>\n</function>\n</tool_call>"
    assert held(call % "red") and not held(call % "green")


def marked(tools, server, template):
    """Whether a text goes on by the grammar of calls."""
    import xgrammar

    from gsd_kernels_serve.processors import Grammars
    from gsd_kernels_serve.tools import chosen, held_to

    what, field = held_to(chosen({"tools": tools}, server.tokenizer), None, "", template)
    assert field == "tools"
    grammars = Grammars(None, 128)
    letters = xgrammar.TokenizerInfo(["<s>", *map(chr, range(1, 128))], stop_token_ids=[0])
    grammars.compilers[(0,)] = xgrammar.GrammarCompiler(letters)
    compiled = grammars.of(what, field, [0])

    def held(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
        return matcher.accept_string(text) and matcher.is_completed()

    return held


def test_what_strict_cannot_hold_is_refused_by_name(calling, monkeypatch):
    loose = [{"type": "function", "function": {"name": "paint", "parameters": {"not": {}}, "strict": True}}]
    assert calling.refusal(CHAT, tools=loose)["param"] == "tools[0].function.parameters.not"
    gemma = {"fields": {"tool_calls": {"open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "content": "json"}}}
    monkeypatch.setattr(calling.tokenizer, "response_template", gemma)
    assert calling.refusal(CHAT, tools=STRICT)["param"] == "tools[0].function.strict"


# ---- other routes


def got(server, path: str, data: bytes | None = None, **headers: str) -> tuple[int, typing.Any, typing.Any]:
    method = headers.pop("method", "GET" if data is None else "POST")
    headers |= {} if data is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def test_a_model_is_told_by_its_name(server):
    assert server.client.models.retrieve("small").id == "small"
    status, body, _ = got(server, "/v1/models/other/name")
    assert status == 404 and "small" in json.loads(body)["error"]["message"]
    for endpoint in fields.ENDPOINTS:
        status, found = server.raw(endpoint, {**ASKED[endpoint], "model": "other"})
        assert (status, found["error"]["code"], found["error"]["param"]) == (404, "model_not_found", "model")
        assert server.refusal(endpoint, temperature="hot")["code"] is None


def test_pages_of_named_origins_may_ask_and_no_others(server, monkeypatch):
    page = {"Origin": "http://localhost:3000"}
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    open_one = Server(origins=["http://localhost:3000"])
    try:
        status, _, headers = got(open_one, CHAT, method="OPTIONS", **page, **asks)
        assert status == 200 and headers["Access-Control-Allow-Origin"] == page["Origin"]
        assert got(open_one, "/v1/models", **page)[2]["Access-Control-Allow-Origin"] == page["Origin"]
        other = got(open_one, "/v1/models", Origin="http://evil.example")[2]
        assert other["Access-Control-Allow-Origin"] is None
        monkeypatch.setattr(Completions, "choice", lambda *_: {}["gone"])
        status, body, headers = got(open_one, COMPLETIONS, b'{"prompt": "x", "max_tokens": 1}', **page)
        assert (status, json.loads(body)["error"]["type"]) == (500, "server_error"), "a fault here is not the client's"
        assert headers["Access-Control-Allow-Origin"] == page["Origin"]
    finally:
        open_one.stop()
    assert got(server, "/v1/models", **page)[2]["Access-Control-Allow-Origin"] is None


# ---- every nested field that the client's types document


def nested(kind: typing.Any, place: tuple[str, ...] = (), within: tuple[typing.Any, ...] = ()) -> set[tuple[str, ...]]:
    """Places of fields in a type: ``("[]", "content")``."""
    if hasattr(kind, "__required_keys__"):  # a TypedDict, of typing or of typing_extensions
        if kind in within:
            return set()
        found = set()
        for name, inner in typing.get_type_hints(kind).items():
            found |= {(*place, name)} | nested(inner, (*place, name), (*within, kind))
        return found
    origin = typing.get_origin(kind)
    if origin in (None, typing.Literal, dict):
        return set()
    listed = isinstance(origin, type) and issubclass(origin, typing.Iterable) and origin is not types.UnionType
    inner = (*place, "[]") if listed else place
    return set().union(*(nested(one, inner, within) for one in typing.get_args(kind)))


CALL = {"id": "1", "type": "function", "function": {"name": "paint", "arguments": "{}"}}
SAID = {"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [CALL]}
ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
VALID = {
    (CHAT, "messages"): [SAID],
    (CHAT, "tools"): TOOLS,
    (CHAT, "tool_choice"): {"type": "function", "function": {"name": "paint"}},
    (CHAT, "response_format"): {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    (CHAT, "stream_options"): {"include_usage": True},
    (CHAT, "prediction"): {"type": "content", "content": [{"type": "text", "text": "x"}]},
    (RESPONSES, "input"): [ITEM],
    (RESPONSES, "tools"): [{"type": "function", **TOOL}],
    (RESPONSES, "tool_choice"): {"type": "function", "name": "paint"},
    (RESPONSES, "text"): {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
    (RESPONSES, "reasoning"): {"effort": "low"},
}


@pytest.mark.parametrize(("endpoint", "field"), VALID, ids=lambda value: row_id(value))
def test_every_nested_field_of_the_client_is_accepted_or_refused_by_name(endpoint, field, server):
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import response_create_params as responses

    assert field in known(endpoint)
    params = chat.CompletionCreateParamsBase if endpoint == CHAT else responses.ResponseCreateParamsBase
    tools = {} if field == "tools" else {"tools": VALID[endpoint, "tools"]} if field == "tool_choice" else {}
    extra = {"stream": True} if field == "stream_options" else {}
    places = nested(typing.get_type_hints(params)[field])
    assert places
    for place in sorted(places):
        value = copy.deepcopy(VALID[endpoint, field])
        at: typing.Any = value
        for name in place[:-1]:
            at = at[0] if name == "[]" and isinstance(at, list) else at.get(name) if isinstance(at, dict) else None
        if not isinstance(at, dict) or place[-1] == "[]":
            continue  # of an object that is refused as a whole
        at[place[-1]] = {"strange": 1}
        body = {**ASKED[endpoint], "max_tokens" if endpoint == CHAT else "max_output_tokens": 1, **tools, **extra}
        status, found = server.raw(endpoint, {**body, field: value})
        assert status in (200, 400), (place, found)
        if status == 400:
            param = found["error"]["param"]
            named = place[-1] == "type" or place[-1] in param or param.endswith("type")
            assert param.startswith(field) and named, (place, found)
