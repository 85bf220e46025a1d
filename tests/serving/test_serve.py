"""``gsd-kernels serve`` as a process: one, which all tests ask, and which the last one interrupts."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from served import ASKED, PROMPT
from typer.testing import CliRunner

from gsd_kernels_cli import demo
from gsd_kernels_cli.app import app
from gsd_kernels_serve.fields import COMPLETIONS

pytestmark = [pytest.mark.long, pytest.mark.slow]

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
