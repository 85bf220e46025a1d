"""A server in this process and how tests ask it: OpenAI's client where it knows the fields, bare requests where not."""

from __future__ import annotations

import json
import socket
import threading
import time
import typing
import urllib.error
import urllib.request

import pytest

from gsd_kernels import GraphConfig
from gsd_kernels_cli import demo
from gsd_kernels_hf import patch, unpatch
from gsd_kernels_serve.fields import CHAT, COMPLETIONS, RESPONSES

openai = pytest.importorskip("openai", reason="the server needs the extra [serving]")
pytest.importorskip("fastapi", reason="the server needs the extra [serving]")
pytest.importorskip("transformers.cli.serving.completion", reason="the server needs transformers 5.15")

TEMPLATE = (
    "{{ bos_token }}{% if tools %}{% for t in tools %}# {{ t['function']['name'] }}\n{% endfor %}{% endif %}"
    "{% if reasoning_effort %}# effort {{ reasoning_effort }}\n{% endif %}{% if flavour %}# {{ flavour }}\n{% endif %}"
    "{% for m in messages %}{% for c in m['tool_calls'] or [] %}# calls {{ c['function']['name'] }}\n{% endfor %}"
    "{{ m['role'] ~ ' ' if m['role'] == 'system' else '' }}{{ m['content'] }}\n{% endfor %}"
)
PROMPT = "def add(a, b):\n"
SHAPE = GraphConfig(depth=4, history_depth=8, history_width=4)  # of every step: auto goes by the clock
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
OFFERED = {CHAT: TOOLS, RESPONSES: [{"type": "function", "strict": None, **TOOL}]}
QWEN = {
    "defaults": {"role": "assistant"},
    "start_anchor": ":\n\n",  # the end of what is asked
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|eos\|>", "content": "text"},
    },
}
"""How transformers knows the answers of Qwen 3, behind what :data:`TEMPLATE` writes."""

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["list", "dict"]}, "full": {"type": "boolean"}},
    "required": ["kind", "full"],
    "additionalProperties": False,
}


class Server:
    """The demo pair, or its target alone without speculation, served from a thread of this process."""

    def __init__(self, speculates: bool = True, template: str = TEMPLATE, **named: typing.Any) -> None:
        import uvicorn

        from gsd_kernels_serve.limits import Limits
        from gsd_kernels_serve.server import make_app

        self.target, draft, self.tokenizer = demo.load()
        self.tokenizer.chat_template = template
        drafting = {"assistant_model": draft, "graph_config": SHAPE} if speculates else {"graph_config": "plain"}
        handle = patch(self.target, tokenizer=self.tokenizer, **drafting)
        own = {key: named.pop(key) for key in ("origins", "hosts") if key in named}
        app = make_app("small", handle, self.tokenizer, speculates=speculates, limits=Limits(**named), **own)
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def stop(self) -> None:
        self.client.close()
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
        return read(self.got(endpoint, **named))[0]

    def refusal(self, endpoint: str, **named: typing.Any) -> dict[str, typing.Any]:
        """The error of a request that is refused."""
        status, found = self.ask(endpoint, **named)
        assert status == 400, found
        assert found["error"]["type"] == "invalid_request_error" and found["error"]["message"]
        return found["error"]


def read(found: typing.Any, index: int = 0) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of an answer, a choice of it, whole or in events."""
    text, calls = "", []
    for data in [found] if isinstance(found, dict) else [json.loads(event) for event in found if event != "[DONE]"]:
        assert not data.get("error") and data.get("type") != "error", data
        for choice in data.get("choices", ()):
            if choice["index"] == index:
                said = choice.get("delta") or choice.get("message") or choice
                text += said.get("content") or said.get("text") or ""
                made = [call["function"] for call in said.get("tool_calls") or ()]
                calls += [(call["name"], call["arguments"]) for call in made]
        for item in data.get("output", ()):
            if item["type"] == "message":
                text += item["content"][0]["text"]
            elif item["type"] == "function_call":
                calls.append((item["name"], item["arguments"]))
        if data.get("type") == "response.output_text.delta":
            text += data["delta"]
        elif data.get("type") == "response.function_call_arguments.done":
            calls.append((data["name"], data["arguments"]))
    return text, calls


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


def row_id(value: str) -> str:
    return value.rpartition("/v1/")[2]


def tokens(server, text: str) -> int:
    return len(server.tokenizer(text)["input_ids"])


def spoken(server, count: int) -> list[dict[str, str]]:
    """A message of the chat template that makes a prompt of so many tokens."""
    message = {"role": "user", "content": ""}
    for more in range(8):
        message["content"] = " x" * (count - more)
        if len(server.tokenizer.apply_chat_template([message])["input_ids"]) == count:
            return [message]
    raise AssertionError(count)
