"""Clients that leave, and texts that fail: their place and their memory are free at once."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
import weakref

import pytest
from fastapi.responses import StreamingResponse
from served import ASKED, LENGTH, row_id

from gsd_kernels_hf.engine.session import Session
from gsd_kernels_serve import fields
from gsd_kernels_serve.calls import Writer
from gsd_kernels_serve.decoding import Queue
from gsd_kernels_serve.door import Door
from gsd_kernels_serve.responses import Items

pytestmark = pytest.mark.slow

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
