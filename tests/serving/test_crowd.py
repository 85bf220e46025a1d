"""One request does not stop the others: huge fields, slow schemas, clients that leave, texts that fail."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import threading
import time
import urllib.request
import weakref
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest
from fastapi.responses import StreamingResponse
from served import ASKED, LENGTH, PROMPT, Server, row_id

from gsd_kernels_hf.engine.session import Session
from gsd_kernels_serve import fields, preparing
from gsd_kernels_serve.calls import Writer
from gsd_kernels_serve.checks import Refused
from gsd_kernels_serve.decoding import Queue
from gsd_kernels_serve.door import Door
from gsd_kernels_serve.fields import CHAT, COMPLETIONS
from gsd_kernels_serve.responses import Items

pytestmark = pytest.mark.slow


# ---- One request does not stop the others: fields that are huge, deep or many, templates and schemas that are slow


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


# ---- Clients that leave, and texts that fail: their place and their memory are free at once


STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
ENDPOINTS = pytest.mark.parametrize("endpoint", fields.ENDPOINTS, ids=row_id)


@pytest.fixture
def held(server, monkeypatch):
    """A text that the thread of all decodings is busy with."""
    begun, over = threading.Event(), threading.Event()

    def ask(self, whole=Writer.ask):
        begun.set()
        over.wait(60)
        return whole(self)

    monkeypatch.setattr(Writer, "ask", ask)
    thread = threading.Thread(target=lambda: server.raw(fields.COMPLETIONS, {"prompt": "x", "max_tokens": 1}))
    thread.start()
    assert begun.wait(60)
    yield
    over.set()
    thread.join()


def door_of(server) -> Door:
    """What counts requests."""
    part = server.server.config.app.middleware_stack
    while not isinstance(part, Door):
        part = part.app
    return part


def send(client: socket.socket, endpoint: str, body: bytes) -> None:
    """Send a request."""
    lines = f"POST {endpoint} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"
    client.sendall("\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body)


def leave(server, endpoint: str, stream: bool) -> None:
    """Send a request, wait until it is under way, and go."""
    body = json.dumps({**ASKED[endpoint], LENGTH[endpoint]: 2, "stream": stream}).encode()
    with socket.create_connection(server.socket.getsockname()) as client:
        send(client, endpoint, body)
        wait_for(lambda: door_of(server).under_way == 2)


def wait_for(what) -> None:
    until = time.monotonic() + 30
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


@STREAMS
@ENDPOINTS
def test_who_left_while_it_waited_has_no_place(endpoint, stream, server, held):
    queue = server.server.config.app.state.queue
    for _ in range(2):
        leave(server, endpoint, stream)
        wait_for(lambda: door_of(server).under_way == 1)
    assert len(queue.turns) <= 2, "of whom left, and of its prompt, nothing is kept but by the last"


class Broken(Exception):
    pass


@pytest.mark.parametrize("why", ["left", "refused", "failed", "refused by a field of generation_config"])
@STREAMS
@ENDPOINTS
def test_a_text_that_ends_early_gives_its_cache_back(endpoint, stream, why, server, monkeypatch):
    """At once: an error has the variables of all calls that it came through, and the cycles that it is in are many."""
    sessions = []

    def begin(self, *args, whole=Session.begin, **kwargs):
        sessions.append(weakref.ref(self))
        return whole(self, *args, **kwargs)

    def put(self, value, whole=Writer.put):
        whole(self, value)
        if why == "left" and self.call.begun.done():
            self.call.gone.set()
            self.ask()
        if self.call.begun.done():
            raise Broken("no") if why == "failed" else ValueError("no")

    monkeypatch.setattr(Session, "begin", begin)
    monkeypatch.setattr(Writer, "put", put)
    gc.collect()
    gc.disable()
    try:
        named = {"generation_config": '{"repetition_penalty": 1.5}'} if why.endswith("config") else {"temperature": 0}
        server.raw(endpoint, {**ASKED[endpoint], LENGTH[endpoint]: 8, "stream": stream, **named})
        assert sessions and not [session for session in sessions if session() is not None]
    finally:
        gc.enable()


@ENDPOINTS
def test_a_stream_ends_whose_client_leaves_while_an_event_is_being_sent(endpoint, server, monkeypatch):
    """At once: the events' generator is not within an ``await`` then; it hears of it once it is collected."""
    over, sending, gone = threading.Event(), threading.Event(), []

    def ask(self, whole=Writer.ask):
        gone[:] = [self.call.gone]
        if self.call.begun.done() and not over.wait(30):
            raise AssertionError("nobody left")
        return whole(self)

    async def stream(self, send, whole=StreamingResponse.stream_response):
        async def slow(message):
            await send(message)
            if message["type"] == "http.response.body":
                sending.set()
                await asyncio.sleep(60)

        kept.append(self)
        await whole(self, slow)

    kept = []  # as a cycle keeps it
    monkeypatch.setattr(Writer, "ask", ask)
    monkeypatch.setattr(StreamingResponse, "stream_response", stream)
    body = json.dumps({**ASKED[endpoint], LENGTH[endpoint]: 64, "stream": True}).encode()
    with socket.create_connection(server.socket.getsockname()) as client:
        send(client, endpoint, body)
        assert sending.wait(30)
    try:
        wait_for(lambda: door_of(server).under_way == 0)
        assert gone[0].is_set()
    finally:
        gone[0].set()
        over.set()


@ENDPOINTS
def test_a_stream_whose_text_fails_before_it_is_decoded_ends(endpoint, server, monkeypatch):
    """It waits for the first token, which never comes, and was waited for until the client left."""

    def broken(*_, **__):
        raise Broken("no memory")

    monkeypatch.setattr(Queue, "decode", broken)
    body = json.dumps({**ASKED[endpoint], LENGTH[endpoint]: 8, "stream": True}).encode()
    with socket.create_connection(server.socket.getsockname()) as client:
        client.settimeout(30)
        send(client, endpoint, body)
        assert b" 500 " in client.recv(64)


def test_an_error_while_events_are_made_is_an_event(server, monkeypatch):
    def broken(self, value, logprobs):
        raise Broken("no event")

    monkeypatch.setattr(Items, "part", broken)
    status, events = server.raw(fields.RESPONSES, {"input": "x", "max_output_tokens": 4, "stream": True})
    assert status == 200
    error, last = (json.loads(event) for event in events[-2:])
    assert (error["type"], error["message"], error["sequence_number"]) == ("error", "no event", len(events) - 2)
    assert (last["type"], last["response"]["error"]["message"]) == ("response.failed", "no event")
    monkeypatch.undo()
    assert server.got(fields.RESPONSES)["status"] == "incomplete", "the next text has its place"
