"""One request does not stop the others: fields that are huge, deep or many, templates and schemas that are slow."""

from __future__ import annotations

import ctypes
import gc
import json
import re
import socket
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from served import ASKED, LENGTH, PROMPT, TEMPLATE, Server, row_id

from gsd_kernels_hf.validate.options import CONFIG_FIELDS
from gsd_kernels_serve import fields, preparing, text_options
from gsd_kernels_serve.checks import Refused, Size
from gsd_kernels_serve.fields import CHAT, COMPLETIONS, RESPONSES
from gsd_kernels_serve.server import SWITCH_SECONDS

pytestmark = pytest.mark.slow

SLOW = "{% if slow %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"


@pytest.fixture(scope="module")
def hurried():
    """A server with small bounds, whose template is as slow as a request asks."""
    server = Server(template=SLOW + TEMPLATE, seconds=3.0, body=400_000, requests=3, prompt=3000)
    yield server
    server.stop()


def deep(levels: int, inner: object = 1) -> object:
    for _ in range(levels):
        inner = [inner]
    return inner


def resident() -> int:
    """Megabytes of this process, once what is free is given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024


HELD = 2.0  # seconds beyond a client's own need that others may cost it


@contextmanager
def beside(server):
    """A second client, which goes on being answered, and about as soon as alone; it fails where it is not."""
    over, answers, errors = threading.Event(), [], []
    need = max(timed(server)[1] for _ in range(3))
    held = []

    def ask() -> None:
        try:
            while not over.is_set():
                answer, seconds = timed(server)
                answers.append(answer)
                held.append(seconds)
                over.wait(0.05)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        over.set()
        thread.join()
    assert not errors and answers and len(set(answers)) == 1
    assert max(held) < HELD + 10 * need, (max(held), need)  # a busy machine makes both slow


def timed(server) -> tuple[str, float]:
    begin = time.monotonic()
    return short(server), time.monotonic() - begin


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
def test_every_field_has_a_bound_and_no_request_holds_a_second_client(endpoint, server):
    short(server)
    before = resident()
    with beside(server):
        for name, field in fields.rows(endpoint).items():
            for kind, value in HOSTILE.items():
                body = {**ASKED[endpoint], LENGTH[endpoint]: 1, name: value}
                status, found = server.raw(endpoint, body)
                accepted = status == 200 and kind in ("huge", "number")
                places = (name, "input") if name == "instructions" else (name,)  # which are read together
                assert accepted or (status == 400 and found["error"]["param"].startswith(places)), (name, kind, found)
                if accepted:
                    assert field.treatment != fields.REFUSED
    assert resident() - before < 150


def test_every_argument_of_a_generation_config_has_a_bound(server):
    names = [name for name, (treatment, *_) in CONFIG_FIELDS.items() if treatment == "honoured"]
    assert set(fields.ARGUMENTS) == set(names) - {*text_options._SERVER_SAYS}
    values = (10**30, -(10**30), 1e300, "x" * 5000, [5] * 1500, {"a": 10**30}, [[5] * 30] * 30)
    with beside(server):
        for name in names:
            for value in values:
                body = {"prompt": PROMPT, "max_tokens": 2, "generation_config": json.dumps({name: value})}
                status, found = server.raw(COMPLETIONS, body)
                assert status in (200, 400), (name, value, found)
    for name in ("encoder_no_repeat_ngram_size", "no_repeat_ngram_size"):
        refused = server.refusal(COMPLETIONS, generation_config=json.dumps({name: 10**30}))
        assert refused["param"] == f"generation_config.{name}"
    refused = server.refusal(COMPLETIONS, generation_config=json.dumps({"stop_strings": "x" * 5000}))
    assert refused["param"] == "generation_config.stop_strings"


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [str(i) for i in range(50_000)]},
        {"enum": [str(i) for i in range(1_001)]},
        {"type": "string", "maxLength": 10**9},
        {"type": "integer", "multipleOf": 10**6},
        {"type": "string", "pattern": "^([a-z]{1,30}[0-9]){1,30}$"},
        {"type": "string", "pattern": "a{99999999999}"},
        {"type": "object", "patternProperties": {"a{301}": {}}},
        json.loads('{"type":"array","items":' * 400 + "{}" + "}" * 400),
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)
def test_a_schema_has_bounds(schema, server):
    form = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
    refused = server.refusal(CHAT, response_format=form)
    assert refused["param"].startswith("response_format")


def test_a_size_counts_names_strings_values_and_depth():
    size = Size(10, 4, 2)
    size.check("field", {"abc": ["defg"], "hij": None})
    for large in ("x" * 11, {"x" * 11: 1}, [1, 2, 3, 4], [[[]]], {"a": "x" * 10}):
        with pytest.raises(Refused, match=r"^field: .* at most 10 characters, 4 values, 2 deep"):
            size.check("field", large)


@pytest.mark.parametrize("odd", ["\ud800", "x\udfffx", float("nan"), float("-inf")], ids=ascii)
@pytest.mark.parametrize("endpoint", fields.ENDPOINTS, ids=row_id)
def test_what_no_answer_could_repeat_is_refused_before_anything_is_decoded(endpoint, odd, server, monkeypatch):
    from gsd_kernels_serve.calls import Decoding

    decoded = []
    monkeypatch.setattr(Decoding, "generate", lambda *_, **__: decoded.append(1))
    for name, field in fields.rows(endpoint).items():
        for value in (odd, [odd], {"a": [odd]}, *([{odd: 1}] if isinstance(odd, str) else [])):
            status, found = server.raw(endpoint, {**ASKED[endpoint], name: value})
            assert (status, found["error"]["param"]) == (400, name), (name, value, found)
            if field.treatment != fields.REFUSED and field.most.depth > 2:
                assert "no character" in found["error"]["message"] or "no number" in found["error"]["message"]
    if isinstance(odd, str):
        status, found = server.raw(endpoint, {**ASKED[endpoint], odd: 1})
        assert status == 400 and found["error"]["param"] == odd.encode(errors="backslashreplace").decode()
    assert not decoded


# ---- off the event loop


@pytest.mark.parametrize("endpoint", fields.ENDPOINTS, ids=row_id)
def test_fields_are_checked_beside_the_event_loop(endpoint, server, monkeypatch):
    threads = []

    def check(*given, whole=fields.check):
        threads.append(threading.current_thread().name)
        return whole(*given)

    monkeypatch.setattr(fields, "check", check)
    server.got(endpoint)
    assert server.refusal(endpoint, unheard_of=1)["param"] == "unheard_of"
    assert threads == [preparing.THREAD] * 2


def test_a_slow_template_holds_nobody_and_ends(hurried):
    with beside(hurried) as answers:
        for endpoint in (CHAT, RESPONSES):
            before = len(answers)
            refused = hurried.refusal(endpoint, chat_template_kwargs={"slow": True})
            assert refused["param"] == fields.NEEDED[endpoint] and "takes more than 3 s" in refused["message"]
            assert len(answers) > before, "others are answered meanwhile"
    while threads := [t for t in threading.enumerate() if t.name == preparing.THREAD]:
        threads[0].join(20)
        assert not threads[0].is_alive(), "it goes on though nobody waits"


def test_a_slow_schema_holds_nobody(hurried, monkeypatch):
    from gsd_kernels_serve.processors import Grammars

    free = threading.Event()
    monkeypatch.setattr(Grammars, "of", lambda *_: free.wait(30))  # as compiled code, which nothing ends
    form = {"response_format": {"type": "json_object"}}
    refused = [hurried.refusal(CHAT, **form)["message"]]
    threads = [
        threading.Thread(target=lambda: refused.append(hurried.raw(CHAT, {**ASKED[CHAT], **form}))) for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    short(hurried)
    for thread in threads:
        thread.join()
    free.set()
    assert "takes more than" in refused[0]
    assert {status for status, _ in refused[1:]} <= {400, 503}, "whoever finds no place is sent away"
    monkeypatch.undo()


def test_names_of_many_speakers_are_rendered_once(server, monkeypatch):
    rendered = []
    whole = type(server.tokenizer).apply_chat_template

    def counting(self, *args, **kwargs):
        rendered.append(1)
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(type(server.tokenizer), "apply_chat_template", counting)
    call = {"id": "1", "type": "function", "function": {"name": "paint", "arguments": "{}"}}
    said = {"role": "assistant", "content": "x", "tool_calls": [call]}
    server.got(CHAT, messages=[{"role": "user", "content": "x"}, said] * 200, max_tokens=1)
    assert len(rendered) == 2
    named = [*[said] * 200, {"role": "user", "content": "x", "name": "ann"}]
    assert server.refusal(CHAT, messages=named)["param"] == "messages[200].name"
    assert len(rendered) == 5


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


def test_more_requests_than_the_bound_are_sent_away(hurried):
    long = {"prompt": PROMPT, "max_tokens": 100, "temperature": 1.0, "seed": 2}
    found = []
    threads = [threading.Thread(target=lambda: found.append(hurried.raw(COMPLETIONS, long)[0])) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {200, 503} and found.count(200) >= 3


# ---- nobody waits any more


@pytest.mark.parametrize("why", ["leaving", "stopping"])
def test_leaving_and_stopping_end_the_reading_of_a_prompt(why, monkeypatch):
    from gsd_kernels_serve.calls import Listener

    server = Server()
    reading, asks = threading.Event(), []

    def ask(self, whole=Listener.ask):
        if self.call.options.config.max_new_tokens != 2:
            return whole(self)
        asks.append(1)
        if len(asks) == 3:  # the first pieces
            reading.set()
            until = time.monotonic() + 20
            while not (self.call.gone if why == "leaving" else self.stopping).is_set() and time.monotonic() < until:
                time.sleep(0.01)
        return whole(self)

    monkeypatch.setattr(Listener, "ask", ask)
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


def test_a_thread_that_is_told_to_end_does_so_wherever_it_is():
    import asyncio

    async def run() -> None:
        prepare = preparing.Preparing(0.2, 1)

        def forever() -> None:
            while True:
                with suppress(Exception):
                    sum(range(100))

        with pytest.raises(Refused, match=r"^field: takes more than 0\.2 s"):
            await prepare("field", forever)
        assert await prepare("field", lambda value: value + 1, 5) == 6, "the place is free again"
        with pytest.raises(ZeroDivisionError):
            await prepare("field", lambda: 1 // 0)

    asyncio.run(run())


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
    """Whatever holds the interpreter: a template, or the processors of a text."""
    own = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    try:
        server = Server()
        try:
            assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
            short(server)
            assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
        finally:
            server.stop()
        assert sys.getswitchinterval() == pytest.approx(0.004), "the process's own comes back"
    finally:
        sys.setswitchinterval(own)
