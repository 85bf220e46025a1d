"""``gsd-kernels serve`` as OpenAI's client sees it: one server, the demo pair, texts compared with ``generate``."""

from __future__ import annotations

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gsd_kernels_cli import demo
from gsd_kernels_hf import generate


@pytest.fixture(scope="module", autouse=True)
def openai():
    """Its client. Importing it and transformers' server takes a second, which a run without these tests has not."""
    client = pytest.importorskip("openai", reason="the server needs the extra [serving]")
    pytest.importorskip("transformers.cli.serving.completion", reason="the server needs transformers 5.15")
    return client


pytestmark = [pytest.mark.long, pytest.mark.slow]

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
PROMPT = "def add(a, b):\n"
PROMPTS = [
    "import os\n",
    "class Queue:\n    def put(self, item):\n",
    "def main():\n",
    "for name in ",
    "def read(self, size):\n",
    "if __name__ == ",
    "try:\n    import ",
    "def __init__(self, ",
]
LOOPBACK = ("localhost", "127.0.0.1", "::1")
GREEDY = {"model": "small", "temperature": 0}


class Server:
    """A server process and its log."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.file = folder / "log"
        command = [sys.executable, "-m", "gsd_kernels_hf", "serve", *arguments, "--port", "0"]
        with open(self.file, "w") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log)
        self.url = self.wait_for(r"at (http\S+);")[1]
        from openai import OpenAI

        self.client = OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=120)

    @property
    def log(self) -> str:
        return self.file.read_text()

    def wait_for(self, pattern: str, seconds: float = 120) -> re.Match:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if found := re.search(pattern, self.log):
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"no {pattern} in the log:\n{self.log}")

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    (folder / "small").mkdir()
    for file in (demo.path() / "target").iterdir():
        (folder / "small" / file.name).symlink_to(file)
    (folder / "small" / "chat_template.jinja").write_text(TEMPLATE)
    draft = str(demo.path() / "draft")
    server = Server(folder, str(folder / "small"), "--draft", draft, "--dtype", "float32", "--name", "small")
    yield server
    server.process.kill()


@pytest.fixture
def client(server):
    yield server.client
    assert server.process.poll() is None, server.log
    assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def direct():
    """The target alone, by ``generate``: the text that a request must give."""
    target, _, tokenizer = demo.load()

    def text(prompt: str, **options) -> str:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = generate(target, ids, tokenizer=tokenizer, **{"do_sample": False, **options})
        return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    return text


def streamed(events) -> tuple[str, list]:
    events = list(events)
    return "".join(event.choices[0].text for event in events), events


def test_health_and_models(server, client):
    with urllib.request.urlopen(server.url.removesuffix("/v1") + "/health") as answer:
        assert json.load(answer) == {"status": "ok"}
    assert [model.id for model in client.models.list()] == ["small"]


def test_completion(server, client, direct):
    answer = client.completions.create(prompt=PROMPT, max_tokens=24, **GREEDY)
    assert answer.choices[0].text == direct(PROMPT, max_new_tokens=24)
    assert answer.choices[0].finish_reason == "length"
    statistics = answer.gsd_kernels
    assert statistics["new_tokens"] == answer.usage.completion_tokens == 24
    assert statistics["tokens_per_step"] > 1.2 and statistics["queued"] >= 0
    server.wait_for(rf"{answer.id}: 9 \+ 24 tokens, {statistics['steps']} steps")


def test_chat(client, direct):
    messages = [{"role": "user", "content": "import os"}, {"role": "assistant", "content": "import sys"}]
    answer = client.chat.completions.create(messages=messages, max_tokens=16, **GREEDY)
    expected = direct("import os\nimport sys\n", max_new_tokens=16)
    assert answer.choices[0].message.content == expected
    assert answer.gsd_kernels["new_tokens"] == 16
    events = list(client.chat.completions.create(messages=messages, max_tokens=16, stream=True, **GREEDY))
    assert "".join(event.choices[0].delta.content or "" for event in events) == expected
    assert events[-1].gsd_kernels["new_tokens"] == 16


def test_without_a_length_a_text_ends_where_the_model_does(client):
    prompt = "import os\n" * 680  # 2,041 tokens of 2,048
    answer = client.completions.create(prompt=prompt, **GREEDY)
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == 2048
    assert answer.choices[0].finish_reason == "length"


def test_other_names_of_this_machine_are_refused(server):
    for name, status in (("evil.example", 400), ("localhost", 200), ("127.0.0.1:1", 200)):
        request = urllib.request.Request(server.url + "/models", headers={"Host": name})
        try:
            with urllib.request.urlopen(request) as answer:
                found = answer.status
        except urllib.error.HTTPError as error:
            found = error.code
            assert "--allowed-host" in json.loads(error.read())["error"]["message"]
        assert found == status, name


def test_the_model_is_loaded_as_transformers_client_asks(server):
    def load(name: str) -> dict:
        request = urllib.request.Request(
            server.url.removesuffix("/v1") + "/load_model",
            json.dumps({"model": name}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read().decode().removeprefix("data: "))

    assert load("small")["status"] == "ready"
    assert load("other") == {"status": "error", "model": "other@main", "message": "only small is served"}


def test_responses(client, direct):
    answer = client.responses.create(model="small", input="import os", max_output_tokens=16, temperature=0)
    assert answer.output_text == direct("import os\n", max_new_tokens=16)


def test_stream(client, direct):
    text, events = streamed(client.completions.create(prompt=PROMPT, max_tokens=24, stream=True, **GREEDY))
    assert text == direct(PROMPT, max_new_tokens=24)
    assert len(events) > 4
    assert events[-1].gsd_kernels["new_tokens"] == events[-1].usage.completion_tokens == 24
    assert all("gsd_kernels" not in event.model_extra for event in events[:-1])


@pytest.mark.parametrize("stop", ["self", ["nothing", "):"]])
def test_stop_strings(stop, client, direct):
    expected = direct("class Queue:\n", max_new_tokens=60, stop_strings=stop)
    strings = [stop] if isinstance(stop, str) else stop
    assert any(string in expected for string in strings), expected
    answer = client.completions.create(prompt="class Queue:\n", max_tokens=60, stop=stop, **GREEDY)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
    text, _ = streamed(
        client.completions.create(prompt="class Queue:\n", max_tokens=60, stop=stop, stream=True, **GREEDY)
    )
    assert text == expected


def test_a_seed_gives_the_same_text_twice(client, direct):
    def ask(seed=None, **options):
        options = {"model": "small", "prompt": PROMPT, "max_tokens": 16, "temperature": 0.9, **options}
        return client.completions.create(seed=seed, **options)

    expected = direct(PROMPT, max_new_tokens=16, do_sample=True, temperature=0.9, seed=7)
    with ThreadPoolExecutor(4) as pool:  # others come between
        others = [pool.submit(ask, seed) for seed in (1, 2, None)]
        first = pool.submit(ask, 7).result().choices[0].text
        texts = {other.result().choices[0].text for other in others}
    assert first == ask(7).choices[0].text == streamed(ask(7, stream=True))[0] == expected
    assert len({first, *texts}) == 4
    assert ask().choices[0].text != ask().choices[0].text, "without a seed every text is another"


def test_eight_clients_at_once(client, direct):
    def ask(prompt):
        return client.completions.create(prompt=prompt, max_tokens=12, **GREEDY).choices[0].text

    def stream(prompt):
        return streamed(client.completions.create(prompt=prompt, max_tokens=12, stream=True, **GREEDY))[0]

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit((ask, stream)[i % 2], prompt) for i, prompt in enumerate(PROMPTS)]
        texts = [task.result() for task in running]
    assert texts == [direct(prompt, max_new_tokens=12) for prompt in PROMPTS]


def request_and_leave(server, *, stream: bool) -> None:
    """Ask for a long text and close the connection: after its first event, or once it is being decoded."""
    body = {"model": "small", "prompt": PROMPT, "max_tokens": 1900, "temperature": 1.0, "seed": 2, "stream": stream}
    host, port = re.match(r"http://(\S+):(\d+)/", server.url).groups()
    data = json.dumps(body).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}"
        connection.sendall(head.encode() + b"\r\n\r\n" + data)
        if stream:
            assert b"200 OK" in connection.recv(4096)
        else:
            time.sleep(0.3)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_goes_away_ends_its_text_alone(stream, server, client, direct):
    before = len(server.log)
    request_and_leave(server, stream=stream)
    answer = client.completions.create(prompt=PROMPT, max_tokens=8, **GREEDY)
    assert answer.choices[0].text == direct(PROMPT, max_new_tokens=8)
    said = server.log[before:]
    # Whose text is not streamed may leave before its turn, on a busy machine.
    assert "+ 1900 tokens" not in said and said.count("the client went away") in ((1,) if stream else (0, 1))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_tokens": 0}, "max_tokens: expected an integer"),
        ({"n": 0}, "n: expected an integer"),
        ({"suffix": "x"}, "suffix: not served"),
        ({"seed": 2**80}, "seed|Overflow"),
        ({"model": "other"}, "pinned to 'small'"),
        ({"temperature": "hot"}, "hot"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_requests_are_refused_by_name(options, named, client, openai):
    arguments = {"prompt": PROMPT, "max_tokens": 8, **GREEDY, **options}
    with pytest.raises(openai.APIStatusError, match=named) as refused:
        client.completions.create(**arguments)
    assert 400 <= refused.value.status_code < 500


def test_a_stream_is_refused_with_a_status(client, openai):
    with pytest.raises(openai.BadRequestError, match="positions"):
        streamed(client.completions.create(prompt=PROMPT * 2048, stream=True, **GREEDY))


def test_memory_stays_flat_over_200_requests(server, client):
    def resident() -> int:
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1])

    for number in range(200):
        if number == 60:
            before = resident()
        prompt = PROMPTS[number % 8] * (1 + number % 3)
        client.completions.create(prompt=prompt, max_tokens=3, **GREEDY)
    assert resident() - before < 6 * 1024, (before, resident())


# ---- last: it ends the server


def test_an_interrupt_ends_it_cleanly(server, openai):
    waiting = threading.Thread(target=request_and_wait, args=(server, openai.APIError))
    waiting.start()
    time.sleep(0.5)  # it is being decoded
    assert server.stop() == 130, server.log
    waiting.join(10)
    assert "Traceback" not in server.log
    assert server.log.rstrip().endswith("gsd-kernels: interrupted")
    assert not re.search("torchao|_pytree", server.log), "packages that it does not use speak up when they are imported"


def test_an_interrupt_while_a_prompt_is_read_ends_it_cleanly(tmp_path, openai):
    server = Server(tmp_path, "--draft", "none", "--dtype", "float32", "--max-prompt", "400000")
    prompt = {"prompt": [5] * 300_000, "max_tokens": 1, "model": "demo"}

    def wait() -> None:
        with pytest.raises(openai.APIError):
            server.client.completions.create(**prompt)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(1.5)  # it is being read, for minutes
    assert server.stop() == 130, server.log
    waiting.join(10)
    assert "Traceback" not in server.log and server.log.rstrip().endswith("gsd-kernels: interrupted")


def request_and_wait(server, expected: type[Exception]) -> None:
    with pytest.raises(expected):
        server.client.completions.create(prompt=PROMPT, max_tokens=2000, model="small", temperature=1.0, seed=2)


def test_a_page_that_points_its_own_name_here_is_sent_away():
    from gsd_kernels_serve.door import host_of
    from gsd_kernels_serve.listen import names_of

    assert names_of("0.0.0.0", []) is None and names_of("0.0.0.0", ["box"]) == [*LOOPBACK, "0.0.0.0", "box"]
    assert names_of("127.0.0.1", []) == [*LOOPBACK, "127.0.0.1"]
    for given, name in (("LocalHost:80", "localhost"), ("[::1]:80", "::1"), ("a.b.", "a.b"), ("", "")):
        assert host_of({"headers": [(b"host", given.encode())]}) == name


def test_it_listens_on_the_loopback_address_alone(server):
    assert re.match(r"http://127\.0\.0\.1:", server.url)


# ---- what is refused before a model is loaded


def test_a_port_in_use_is_named(tmp_path):
    from typer.testing import CliRunner

    from gsd_kernels_cli.app import app

    with socket.create_server(("127.0.0.1", 0)) as other:
        result = CliRunner().invoke(app, ["serve", "--port", str(other.getsockname()[1])])
    assert result.exit_code == 1
    assert re.search(r"error: --host, --port: 127.0.0.1:\d+ cannot be opened: address already in use", result.stderr)


def test_a_bad_model_is_named(tmp_path):
    from typer.testing import CliRunner

    from gsd_kernels_cli.app import app

    result = CliRunner().invoke(app, ["serve", str(tmp_path / "none"), "--port", "0"])
    assert result.exit_code == 2 and "no such folder" in result.stderr


def test_other_transformers_are_refused_by_name(monkeypatch):
    import transformers

    from gsd_kernels_serve.installed import check_installed

    check_installed()
    monkeypatch.setattr(transformers, "__version__", "5.14.1")
    with pytest.raises(ImportError, match=r"transformers 5\.15 or newer.*5\.14\.1"):
        check_installed()
