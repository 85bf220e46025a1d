"""One request does not stop the others: fields that are huge, deep or many, templates and schemas that are slow."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest
from served import ASKED, LENGTH, PROMPT, Server, row_id

from gsd_kernels_serve import fields, preparing
from gsd_kernels_serve.checks import Refused
from gsd_kernels_serve.fields import CHAT, COMPLETIONS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hurried():
    """A server with small bounds."""
    server = Server(seconds=3.0, body=400_000, requests=3, prompt=3000)
    yield server
    server.stop()


def deep(levels: int, inner: object = 1) -> object:
    for _ in range(levels):
        inner = [inner]
    return inner


def short(server) -> str:
    with urllib.request.urlopen(server.url + "/health", timeout=10) as answer:
        assert json.load(answer) == {"status": "ok"}
    body = json.dumps({"prompt": PROMPT, "max_tokens": 3, "temperature": 0}).encode()
    request = urllib.request.Request(server.url + COMPLETIONS, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)["choices"][0]["text"]


HOSTILE = {
    "huge": "x" * 300_000,
    "number": 10**4000,
    "deep": deep(800),
    "nested": json.loads('{"type": "function", "a":' * 300 + "1" + "}" * 300),
    "many": [{"role": "user", "content": "x"}] * 12_000,
    "entries": {str(i): i for i in range(12_000)},
}


@pytest.mark.parametrize("endpoint", fields.ENDPOINTS, ids=row_id)
def test_every_field_has_a_bound(endpoint, server):
    """Each is asked with three of the six values, neighbours with the other three."""
    for i, (name, field) in enumerate(fields.rows(endpoint).items()):
        for kind, value in list(HOSTILE.items())[i % 2 :: 2]:
            status, found = server.raw(endpoint, {**ASKED[endpoint], LENGTH[endpoint]: 1, name: value})
            accepted = status == 200 and kind in ("huge", "number") and field.treatment != fields.REFUSED
            places = (name, "input") if name == "instructions" else (name,)  # which are read together
            assert accepted or (status == 400 and found["error"]["param"].startswith(places)), (name, kind, found)


def test_every_argument_of_a_generation_config_has_a_bound(server):
    values = (10**30, -(10**30), 1e300, "x" * 5000, [5] * 1500, {"a": 10**30}, [[5] * 30] * 30)
    for name in fields.ARGUMENTS:
        for value in values:
            body = {"prompt": PROMPT, "max_tokens": 2, "generation_config": json.dumps({name: value})}
            status, found = server.raw(COMPLETIONS, body)
            assert status in (200, 400), (name, value, found)
    for name, value in (("no_repeat_ngram_size", 10**30), ("stop_strings", "x" * 5000)):
        refused = server.refusal(COMPLETIONS, generation_config=json.dumps({name: value}))
        assert refused["param"] == f"generation_config.{name}"


ODD = ("\ud800", "x\udfffx", float("nan"), float("-inf"))


@pytest.mark.parametrize("endpoint", fields.ENDPOINTS, ids=row_id)
def test_what_no_answer_could_repeat_is_refused_before_anything_is_decoded(endpoint, server):
    for name, field in fields.rows(endpoint).items():
        deep = field.treatment != fields.REFUSED and field.most.depth > 2
        reason = "no character|no number" if deep else None
        for odd in ODD:
            for value in (odd, [odd], {"a": [odd]}, *([{odd: 1}] if isinstance(odd, str) else [])):
                with pytest.raises(Refused, match=reason) as refused:
                    fields.check(endpoint, {**ASKED[endpoint], name: value})
                assert refused.value.field == name
    for odd in ODD[:2]:
        status, found = server.raw(endpoint, {**ASKED[endpoint], odd: 1})
        assert status == 400 and found["error"]["param"] == odd.encode(errors="backslashreplace").decode()
        assert server.raw(endpoint, {**ASKED[endpoint], "user": odd})[0] == 400


# ---- off the event loop


def test_others_are_answered_beside_a_slow_schema(hurried, monkeypatch):
    from gsd_kernels_serve.processors import Grammars

    begun, over = threading.Event(), threading.Event()

    def of(*_):
        begun.set()
        over.wait(60)  # as compiled code, which nothing ends

    monkeypatch.setattr(Grammars, "of", of)
    form = {**ASKED[CHAT], "response_format": {"type": "json_object"}}
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(hurried.raw, CHAT, form) for _ in range(2)]
        assert begun.wait(60)
        short(hurried)
        found = [one.result() for one in asked]
        over.set()
    assert {status for status, _ in found} <= {400, 503}, "whoever finds no place is sent away"
    assert any("takes more than" in body["error"]["message"] for _, body in found)


def test_more_requests_than_the_bound_are_sent_away(hurried, monkeypatch):
    from gsd_kernels_serve.calls import Writer

    over = threading.Event()
    monkeypatch.setattr(Writer, "ask", lambda self, whole=Writer.ask: over.wait(60) and whole(self))
    with ThreadPoolExecutor(6) as pool:
        body = {"prompt": PROMPT, "max_tokens": 2}
        asked = as_completed([pool.submit(hurried.raw, COMPLETIONS, body) for _ in range(6)])
        assert [next(asked).result()[0] for _ in range(3)] == [503] * 3, "the others are being decoded"
        over.set()
        assert [one.result()[0] for one in asked] == [200] * 3


# ---- bodies and numbers of requests


def test_bodies_and_prompts_are_bounded_by_option(hurried):
    status, found = hurried.raw(COMPLETIONS, {"prompt": "x" * 500_000})
    assert status == 413 and "--max-body" in found["error"]["message"]
    for prompt in ([5] * 3001, " x" * 3001, "x" * 300_000):
        status, found = hurried.raw(COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
        assert status == 400 and "--max-prompt" in found["error"]["message"], found
    assert hurried.refusal(COMPLETIONS, prompt=["x"] * 300, n=10)["param"] == "n"


def test_a_slow_body_ends_alone(hurried, monkeypatch):
    from gsd_kernels_serve import door

    monkeypatch.setattr(door, "READ_SECONDS", 0.5)
    with socket.create_connection(hurried.socket.getsockname()) as slow:
        slow.settimeout(30)
        slow.sendall(head(hurried, 1000) + b'{"prompt"')
        short(hurried)
        assert b"408" in slow.recv(4096)


def head(server, length: int) -> bytes:
    port = server.socket.getsockname()[1]
    lines = f"POST {COMPLETIONS} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Content-Type: application/json"
    return "\r\n".join((*lines, f"Content-Length: {length}", "", "")).encode()


# ---- nobody waits any more


@pytest.mark.parametrize("why", ["leaving", "stopping"])
def test_leaving_and_stopping_end_the_reading_of_a_prompt(why, monkeypatch):
    from gsd_kernels_serve.calls import Writer

    server = Server()
    reading, asks = threading.Event(), []

    def ask(self, whole=Writer.ask):
        if self.call.options.config.max_new_tokens != 2:
            return whole(self)
        asks.append(1)
        if len(asks) == 3:  # the first pieces
            reading.set()
            until = time.monotonic() + 20
            while not (self.call.gone if why == "leaving" else self.stopping).is_set() and time.monotonic() < until:
                time.sleep(0.01)
        return whole(self)

    monkeypatch.setattr(Writer, "ask", ask)
    body = json.dumps({"prompt": [5] * 4000, "max_tokens": 2}).encode()
    try:
        with socket.create_connection(server.socket.getsockname()) as client:
            client.sendall(head(server, len(body)) + body)
            assert reading.wait(20)
            if why == "stopping":
                server.server.config.app.state.stopping.set()
                assert b"503" in client.recv(4096)
        if why == "leaving":
            short(server)
        assert len(asks) == 3, "it read on"
    finally:
        server.stop()


def test_a_thread_that_cannot_start_takes_no_place(monkeypatch):
    import asyncio

    def start(self):
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        prepare = preparing.Preparing(0.5, 1)
        with monkeypatch.context() as context:
            context.setattr(threading.Thread, "start", start)
            for _ in range(3):
                with pytest.raises(preparing.BusyError, match="can't start new thread; try again later"):
                    await prepare("field", int)
        assert await prepare("field", int) == 0

    asyncio.run(run())


def test_threads_take_turns_sooner_while_an_application_lives():
    own = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    try:
        server = Server()
        try:
            assert sys.getswitchinterval() < 0.003
        finally:
            server.stop()
        assert sys.getswitchinterval() == pytest.approx(0.004), "the process's own comes back"
    finally:
        sys.setswitchinterval(own)
