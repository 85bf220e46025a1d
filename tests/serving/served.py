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
    "{% if m['name'] and not loop.first %}# {{ m['name'] }}\n{% endif %}"
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


def asked(url: str, body: object = None, method: str | None = None, **headers: str) -> tuple[int, str, typing.Any]:
    """Status, text and headers of a bare request; a body that is no bytes is sent as JSON."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


class Server:
    """The demo pair, or its target alone without speculation, served from a thread of this process."""

    def __init__(self, speculates: bool = True, origins: tuple[str, ...] = (), **limits: typing.Any) -> None:
        import uvicorn

        from gsd_kernels_serve.limits import Limits
        from gsd_kernels_serve.server import make_app

        self.target, draft, self.tokenizer = demo.load()
        self.tokenizer.chat_template = TEMPLATE
        drafting = {"assistant_model": draft, "graph_config": SHAPE} if speculates else {"graph_config": "plain"}
        handle = patch(self.target, tokenizer=self.tokenizer, **drafting)
        named = {"origins": origins, "limits": Limits(**limits)}
        app = make_app("small", handle, self.tokenizer, **named)
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
        status, text, _ = asked(self.url + endpoint, body)
        if text.startswith("data: "):
            return status, [part.removeprefix("data: ") for part in text.split("\n\n") if part]
        return status, json.loads(text)

    def ask(self, endpoint: str, **named: typing.Any) -> tuple[int, typing.Any]:
        """Status and body, or events, of a short greedy request with some fields; ``...``: without one."""
        body = {"model": "small", "temperature": 0, LENGTH[endpoint]: 8, **ASKED[endpoint], **named}
        status, found = self.raw(endpoint, {key: value for key, value in body.items() if value is not ...})
        if isinstance(found, list) and endpoint != RESPONSES:
            assert found.pop() == "[DONE]"
        return status, found

    def got(self, endpoint: str, **named: typing.Any) -> typing.Any:
        """The body of a request that is served."""
        status, found = self.ask(endpoint, **named)
        assert status == 200, found
        return found

    def text(self, endpoint: str, **named: typing.Any) -> str:
        """The text of a request that is served."""
        return read(self.got(endpoint, **named)).text

    def refusal(self, endpoint: str, **named: typing.Any) -> dict[str, typing.Any]:
        """The error of a request that is refused, with a status though it be a stream."""
        named = named if {"stream", "stream_options"} & named.keys() else {**named, "stream": True}
        status, found = self.ask(endpoint, **named)
        assert status == 400 and found["error"]["type"] == "invalid_request_error" and found["error"]["message"], found
        return found["error"]


class Said(typing.NamedTuple):
    """A text of an answer as its client gets it, whole or in events."""

    text: str
    calls: list[tuple[str, str]]
    thought: str
    finish: str | None
    logprobs: dict[str, list]


def read(found: typing.Any, index: int = 0) -> Said:
    """A choice of an answer, or the text of a response."""
    said = {"text": "", "thought": "", "finish": None}
    calls, logprobs = [], {}

    def add(text=None, thought=None, call=None, finish=None, columns=None) -> None:
        said["text"] += text or ""
        said["thought"] += thought or ""
        said["finish"] = finish or said["finish"]
        calls.extend((one["name"], one["arguments"]) for one in call or ())
        for key, values in (columns or {}).items():
            logprobs[key] = logprobs.get(key, []) + (values or [])

    for data in [found] if isinstance(found, dict) else map(json.loads, found):
        assert not data.get("error") and data.get("type") != "error", data
        for choice in (choice for choice in data.get("choices", ()) if choice["index"] == index):
            part = choice.get("delta") or choice.get("message") or choice
            made = [call["function"] for call in part.get("tool_calls") or ()]
            text = part.get("content") or part.get("text")
            add(text, part.get("reasoning_content"), made, choice["finish_reason"], choice.get("logprobs"))
        for item in data.get("output", ()):
            (content,) = item.get("content") or [{"text": ""}]
            whole = {"reasoning": {"thought": content["text"]}, "function_call": {"call": [item]}}
            add(**whole.get(item["type"], {"text": content["text"], "columns": {"content": content.get("logprobs")}}))
        if data.get("type") == "response.output_text.delta":
            add(data["delta"], columns={"content": data.get("logprobs")})
        elif data.get("type") == "response.reasoning_text.delta":
            add(thought=data["delta"])
        elif data.get("type") == "response.function_call_arguments.done":
            add(call=[data])
        status = data.get("response", data).get("status")
        add(finish=status if status in ("completed", "incomplete") else None)
    return Said(calls=calls, logprobs={key: values for key, values in logprobs.items() if values}, **said)


def row_id(value: object) -> str | None:
    return value.rpartition("/v1/")[2] if isinstance(value, str) else None


def tokens(server, text: str) -> int:
    return len(server.tokenizer(text)["input_ids"])
