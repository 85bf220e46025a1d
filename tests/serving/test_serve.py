"""The server to its clients: a process of the command, what six clients send, other routes, and requests in a crowd."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pytest
from served import ASKED, LENGTH, PROMPT, Server, asked, read, row_id
from typer.testing import CliRunner

from gsd_kernels_cli import demo
from gsd_kernels_cli.app import app
from gsd_kernels_hf.engine.session import Session
from gsd_kernels_serve.calls import Writer
from gsd_kernels_serve.fields import CHAT, COMPLETIONS, ENDPOINTS, RESPONSES
from gsd_kernels_serve.schemas import Grammars

pytestmark = [pytest.mark.long, pytest.mark.slow]


# ---- ``gsd-kernels serve`` as a process


def test_a_process_serves_tells_in_its_log_and_ends_cleanly_while_a_prompt_is_read(tmp_path):
    file = tmp_path / "log"
    models = [str(demo.path() / "target"), "--draft", str(demo.path() / "draft"), "--dtype", "float32"]
    given = ["serve", *models, "--name", "small", "--max-prompt", "400000", "--port", "0"]
    with open(file, "w") as log:
        process = subprocess.Popen([sys.executable, "-m", "gsd_kernels_hf", *given], stderr=log, stdout=log)

    def wait_for(pattern: str) -> re.Match:
        until = time.monotonic() + 120
        while time.monotonic() < until and process.poll() is None:
            if found := re.search(pattern, file.read_text()):
                return found
            time.sleep(0.05)
        raise AssertionError(f"no {pattern} in the log:\n{file.read_text()}")

    try:
        url = wait_for(r"at (http://127\.0\.0\.1:\S+)/v1;")[1]
        assert asked(f"{url}/health")[1] == '{"status":"ok"}'
        assert [model["id"] for model in json.loads(asked(f"{url}/v1/models")[1])["data"]] == ["small"]
        for name, status in (("evil.example", 400), ("localhost", 200), ("127.0.0.1:1", 200)):
            found, body, _ = asked(f"{url}/v1/models", Host=name)
            assert found == status and (status == 200 or "--allowed-host" in body), name
        found = json.loads(asked(url + COMPLETIONS, {**ASKED[COMPLETIONS], "max_tokens": 24, "temperature": 0})[1])
        wait_for(rf"{found['id']}: 9 \+ 24 tokens, {found['gsd_kernels']['steps']} steps")

        def ask() -> None:
            with contextlib.suppress(OSError):  # the connection ends, or there is time for an answer
                assert asked(url + COMPLETIONS, {"prompt": [5] * 300_000, "max_tokens": 1})[0] == 503

        waiting = threading.Thread(target=ask)
        waiting.start()
        time.sleep(1)  # it is being read, for minutes
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, file.read_text()
        waiting.join(10)
        assert not waiting.is_alive()
        text = file.read_text()
        assert "Traceback" not in text and text.rstrip().endswith("gsd-kernels: interrupted")
        assert not re.search("torchao|_pytree", text), "unused packages speak up when they are imported"
    finally:
        process.kill()


def test_who_waits_is_told_that_the_server_stops_though_what_is_computed_takes_longer(monkeypatch):
    server, reading, over = Server(), threading.Event(), threading.Event()
    server.server.config.timeout_graceful_shutdown = 0
    monkeypatch.setattr(Writer, "ask", lambda self, ask=Writer.ask: reading.set() or (over.wait(60) and ask(self)))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.raw, COMPLETIONS, {"prompt": "x"})
        assert reading.wait(60)
        server.server.should_exit = True
        status, found = waiting.result()
    over.set()
    server.server.config.app.state.service.queue.wait(60)
    server.stop()
    assert (status, found["error"]["message"]) == (503, "the server is stopping")


# ---- what clients send of their own accord


RECORDED = json.loads(Path(__file__).with_name("clients.json").read_text(encoding="utf-8"))
"""First requests of langchain-openai 1.7, pydantic-ai 2.68, openai-agents, llama-index-llms-openai-like 0.8, lm-eval
0.4.13 and openai 3.57, with what they add by default: to a message, tools, a type to answer with."""


@pytest.mark.parametrize("name", RECORDED)
def test_a_first_request_is_served(name, server):
    endpoint, body = RECORDED[name]["endpoint"], RECORDED[name]["body"]
    if "response_format" in body or "text" in body or body.get("tool_choice") == "required":
        pytest.importorskip("xgrammar")
    status, found = server.raw(endpoint, {LENGTH[endpoint]: 4, **body})
    assert status == 200, found


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=row_id)
def test_openais_client_reads_answers_and_events(endpoint, server):
    ask = {
        CHAT: server.client.chat.completions,
        COMPLETIONS: server.client.completions,
        RESPONSES: server.client.responses,
    }
    body = {"model": "small", "temperature": 0, LENGTH[endpoint]: 8, **ASKED[endpoint]}
    whole = ask[endpoint].create(**body).model_dump(exclude_unset=True)
    events = [event.model_dump_json(exclude_unset=True) for event in ask[endpoint].create(**body, stream=True)]
    assert read(whole) == read(events) == read(server.got(endpoint))


def test_a_model_is_told_by_its_name(server):
    assert server.client.models.retrieve("small").id == "small"
    status, body, _ = asked(server.url + "/v1/models/other/name")
    assert status == 404 and "small" in json.loads(body)["error"]["message"]
    for endpoint in ENDPOINTS:
        status, found = server.raw(endpoint, {**ASKED[endpoint], "model": "other"})
        assert (status, found["error"]["code"], found["error"]["param"]) == (404, "model_not_found", "model")
    told = [json.loads(server.raw("/load_model", {"model": name})[1][0]) for name in ("small", "other")]
    assert [one["status"] for one in told] == ["ready", "error"]


# ---- a server with small bounds, which drafts for a prediction alone, and whose pages of one origin may ask


PAGE = {"Origin": "http://localhost:3000"}


@pytest.fixture(scope="module")
def hurried():
    server = Server(speculates=False, origins=(PAGE["Origin"],), seconds=2.0, body=400_000, requests=3, prompt=3000)
    yield server
    server.stop()


def test_pages_of_named_origins_may_ask_and_no_others(hurried, server):
    for one, origin, allowed in (
        (hurried, PAGE, True),
        (hurried, {"Origin": "http://evil.example"}, False),
        (server, PAGE, False),
    ):
        found = asked(f"{one.url}/v1/models", **origin)[2]["Access-Control-Allow-Origin"]
        assert found == (PAGE["Origin"] if allowed else None)
    status, _, headers = asked(hurried.url + CHAT, None, "OPTIONS", **PAGE, **{"Access-Control-Request-Method": "POST"})
    assert status == 200 and headers["Access-Control-Allow-Origin"] == PAGE["Origin"]


def test_a_prediction_drafts_where_the_server_decodes_plainly(hurried):
    named = {"max_tokens": 48, "temperature": 2, "seed": 11}
    plain = hurried.got(CHAT, **named)
    drafted = hurried.got(CHAT, prediction={"type": "content", "content": PROMPT + read(plain).text}, **named)
    again = hurried.got(CHAT, **named)
    assert read(plain) == read(drafted) == read(again)
    steps = [found["gsd_kernels"]["tokens_per_step"] for found in (plain, again, drafted)]
    assert steps[:2] == [1, 1] and steps[2] > 1


def test_others_are_answered_beside_a_slow_schema(hurried, monkeypatch):
    begun, over = threading.Event(), threading.Event()

    def of(*_):
        begun.set()
        over.wait(60)  # as compiled code, which nothing ends

    monkeypatch.setattr(Grammars, "of", of)
    form = {**ASKED[CHAT], "response_format": {"type": "json_object"}}
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(hurried.raw, CHAT, form) for _ in range(2)]
        assert begun.wait(60)
        hurried.got(COMPLETIONS)
        found = [one.result() for one in waiting]
        over.set()
    assert {status for status, _ in found} <= {400, 503}, "whoever finds no place is sent away"
    assert any("takes more than" in body["error"]["message"] for _, body in found)


def test_bodies_prompts_and_numbers_of_requests_are_bounded_by_option(hurried, monkeypatch):
    status, found = hurried.raw(COMPLETIONS, {"prompt": "x" * 500_000})
    assert status == 413 and "--max-body" in found["error"]["message"]
    for prompt in ([5] * 3001, " x" * 3001, "x" * 300_000):
        assert "--max-prompt" in hurried.refusal(COMPLETIONS, prompt=prompt)["message"]
    assert hurried.refusal(COMPLETIONS, prompt=["x"] * 300, n=10)["param"] == "n"
    over = threading.Event()
    monkeypatch.setattr(Writer, "ask", lambda self, whole=Writer.ask: over.wait(60) and whole(self))
    with ThreadPoolExecutor(6) as pool:
        found = as_completed(
            [pool.submit(hurried.raw, COMPLETIONS, {"prompt": "x", "max_tokens": 2}) for _ in range(6)]
        )
        assert [next(found).result()[0] for _ in range(3)] == [503] * 3, "the others are being decoded"
        over.set()
        assert [one.result()[0] for one in found] == [200] * 3


def sent(server, endpoint: str, length: int, body: bytes = b"", **named: object) -> socket.socket:
    """A connection on which a request has been sent; ``length``: its body's, as it says."""
    body = body or json.dumps({**ASKED[endpoint], **named}).encode()
    lines = f"POST {endpoint} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"
    client = socket.create_connection(server.socket.getsockname(), timeout=30)
    client.sendall("\r\n".join((*lines, f"Content-Length: {length or len(body)}", "", "")).encode() + body)
    return client


def test_a_slow_body_ends_alone(hurried, monkeypatch):
    monkeypatch.setattr("gsd_kernels_serve.server.READ_SECONDS", 0.5)
    with sent(hurried, COMPLETIONS, 1000, b'{"prompt"') as slow:
        hurried.got(COMPLETIONS)
        assert b"408" in slow.recv(4096)


# ---- nobody waits any more: places and memory are free at once


def test_leaving_ends_the_reading_of_a_prompt(server, monkeypatch):
    reading, asks = threading.Event(), []

    def ask(self, whole=Writer.ask):
        if self.call.prompt.config.max_new_tokens != 2:
            return whole(self)
        asks.append(1)
        if len(asks) == 3:  # the first pieces
            reading.set()
            self.call.request.gone.wait(20)
        return whole(self)

    monkeypatch.setattr(Writer, "ask", ask)
    with sent(server, COMPLETIONS, 0, prompt=[5] * 4000, max_tokens=2):
        assert reading.wait(20)
    server.got(COMPLETIONS)
    assert len(asks) == 3, "it read on"


class Broken(Exception):
    pass


REASONS = ("left", "failed", "refused by a field")
ENDED = [(endpoint, why) for endpoint in ENDPOINTS for why in REASONS]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("endpoint", "why"), ENDED, ids=[f"{row_id(endpoint)}-{why}" for endpoint, why in ENDED])
def test_a_text_that_ends_early_says_so_and_gives_its_cache_back(endpoint, stream, why, server, monkeypatch):
    """At once: an error has the variables of all calls that it came through, and the cycles that it is in are many."""
    sessions = []

    def begin(self, *args, whole=Session.begin, **kwargs):
        sessions.append(weakref.ref(self))
        return whole(self, *args, **kwargs)

    def put(self, value, whole=Writer.put):
        whole(self, value)
        if why == "left" and self.begun:
            self.call.request.gone.set()
            self.ask()
        if self.begun and why in ("failed", "refused by a field"):
            raise Broken("no") if why == "failed" else ValueError("no")

    monkeypatch.setattr(Session, "begin", begin)
    monkeypatch.setattr(Writer, "put", put)
    gc.collect()
    gc.disable()
    try:
        named = {"generation_config": '{"repetition_penalty": 1.5}'} if why == "refused by a field" else {}
        status, found = server.raw(endpoint, {**ASKED[endpoint], LENGTH[endpoint]: 8, "stream": stream, **named})
        assert not [session for session in sessions if session() is not None]
    finally:
        gc.enable()
    if status != 200:
        kinds = {"left": (499, "the client went away"), "refused by a field": (400, "no")}
        assert (status, found["error"]["message"].rpartition(": ")[2]) == kinds.get(why, (500, "no"))
    elif why != "left":
        assert stream and len(found) > 1 and "[DONE]" not in found
        *_, error, last = map(json.loads, found)
        if endpoint == RESPONSES:
            assert (error["type"], error["sequence_number"]) == ("error", len(found) - 2)
            assert last["type"] == "response.failed"
        last = last["response"] if endpoint == RESPONSES else last
        assert last["error"]["message"].endswith("no")
    monkeypatch.undo()
    server.got(endpoint)  # the next text has its place


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = CliRunner().invoke(app, ["serve", "--port", str(other.getsockname()[1])])
    assert result.exit_code == 1
    assert re.search(r"error: --host, --port: 127.0.0.1:\d+ cannot be opened: address already in use", result.stderr)
