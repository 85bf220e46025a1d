"""llama.cpp as it is built on a machine: its own ``llama-server`` and ``llama-quantize``, by any weights it knows."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .base import Engine, Place, Setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE = "model.gguf"
VARIABLE = "GSD_KERNELS_LLAMA_CPP"
LOAD_SECONDS = 120.0  # seconds for a server to load its model
#: Its n-gram modes, each with what it drafts at a time: after three tokens that recur, or by its own tables.
LOOKUPS = (
    *(("ngram-simple", 5), ("ngram-simple", 10), ("ngram-map-k", 10), ("ngram-map-k4v", 10)),
    *(("ngram-mod", 16), ("ngram-cache", 8)),
)
REMEMBERS = ("ngram-mod",)  # earlier texts
KEYS = {"ngram-simple": 3, "ngram-map-k": 3, "ngram-map-k4v": 3, "ngram-mod": 8}  # tokens that have to recur


def find_binaries(folder: Path | None) -> Path | None:
    """The folder with llama-server: ``folder``, ``$GSD_KERNELS_LLAMA_CPP``, or where PATH has it.

    Raises:
        ValueError: one of the first two is given and has none.
    """
    for what, given in (("--llama-cpp", folder), (VARIABLE, os.environ.get(VARIABLE))):
        if given:
            place = Path(given).expanduser()
            if not (place / "llama-server").is_file():
                raise ValueError(f"{what}: no llama-server in {place}; build its target llama-server there")
            return place.resolve()
    program = shutil.which("llama-server")
    return None if program is None else Path(program).resolve().parent


@dataclass(frozen=True)
class LlamaServer(Engine):
    """One slot, no prompt cache; requests by a socket of this machine.

    Attributes:
        binaries: folder of llama-server and llama-quantize; ``None``: it is missing.
        weights: a type that llama-quantize knows; empty: those of ``source``, or the model's own.
        source: the GGUF file that the model came from; ``None``: one is written from the model.
        ends: tokens that end a text, of which a file that is written gets the first.
    """

    binaries: Path | None
    weights: str = ""
    source: Path | None = None
    ends: tuple[int, ...] = ()
    packages: tuple[str, ...] = ("gguf",)

    @property
    def name(self) -> str:
        return "-".join(filter(None, ("llama-cpp", self.weights or "file" * (self.source is not None))))

    def prepare(self, target: PreTrainedModel, draft: PreTrainedModel | None, folder: Path) -> None:
        from .gguf_file import write_gguf

        if draft is not None:
            write_gguf(draft, folder / "draft", self.ends)
        place = folder / "target"
        if self.source is None:
            write_gguf(target, place, self.ends)
        else:
            place.mkdir(parents=True)
            (place / FILE).symlink_to(self.source.resolve())
        if self.weights:
            made, tool = place / f"{self.weights}.gguf", Path(f"{self.binaries}/llama-quantize")
            if not tool.is_file():
                raise FileNotFoundError(f"{self.name}: no llama-quantize in {self.binaries}; build it there")
            command = [tool, "--allow-requantize", place / FILE, made, self.weights.upper()]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"llama-quantize {self.weights}: {' '.join(done.stderr.split())[-200:]}")
            made.replace(place / FILE)

    def choices(self, kind: str) -> list[Setting]:
        if kind == "lookup":
            return [Setting(kind, tokens, mode) for mode, tokens in LOOKUPS]
        return super().choices(kind)

    def weight_bytes(self, folder: Path) -> int | None:
        import gguf

        return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(folder / "target" / FILE).tensors)

    def start(self, place: Place) -> _Servers:
        return _Servers(place, f"{self.binaries}/llama-server")

    def about(self) -> str:
        done = subprocess.run([f"{self.binaries}/llama-server", "--version"], capture_output=True, text=True)
        return " ".join(f"llama.cpp {done.stdout} {done.stderr}".split())


class _Servers:
    """One server a kind; it is started anew for another setting."""

    def __init__(self, place: Place, binary: str) -> None:
        self.place, self.binary = place, binary
        self.opened: dict[str, tuple[Setting, _Server]] = {}

    def open(self, setting: Setting) -> None:
        if setting.mode not in REMEMBERS:
            setting = replace(setting, round=0)
        if self.opened.get(setting.kind, (None,))[0] == setting:
            return
        if setting.kind in self.opened:
            self.opened.pop(setting.kind)[1].close()
        self.opened[setting.kind] = setting, _Server(self._command(setting))

    def _command(self, setting: Setting) -> list[str]:
        place, mode = self.place, setting.mode
        # Its own cache is float16, which is what its users have beside any weights but float32.
        cache = "f32" if place.dtype == "float32" else "f16"
        options = {
            "-m": place.folder / "target" / FILE,
            **{"-t": place.threads, "-tb": place.threads, "-c": place.longest + 256, "-np": 1, "-cram": 0},
            **{"-ctk": cache, "-ctv": cache},
        }
        if setting.kind == "draft":
            options |= {"-md": place.folder / "draft" / FILE, "-td": place.threads, "--spec-type": "draft-simple"}
            options |= {"--spec-draft-type-k": cache, "--spec-draft-type-v": cache}
        elif setting.kind == "lookup":
            options |= {"--spec-type": mode}
        if mode == "ngram-mod":
            options |= {"--spec-ngram-mod-n-match": KEYS[mode], "--spec-ngram-mod-n-min": 2}
            options |= {"--spec-ngram-mod-n-max": setting.tokens}
        elif mode in KEYS:
            options |= {f"--spec-{mode}-size-n": KEYS[mode], f"--spec-{mode}-size-m": setting.tokens}
        elif setting.tokens:
            options |= {"--spec-draft-n-max": setting.tokens}
        flags = ["--no-ui", "--offline", "--log-disable"]
        return [self.binary, *flags, *(str(part) for option in options.items() for part in option)]

    def decode(self, setting: Setting, ids: Sequence[int], new_tokens: int) -> list[int]:
        ends = self.place.ends
        request = {
            **{"prompt": list(ids), "n_predict": new_tokens, "temperature": 0.0, "cache_prompt": False},
            **{"return_tokens": True, "ignore_eos": not ends},
        }
        answer = self.opened[setting.kind][1].ask("/completion", request)[1]
        if "tokens" not in answer:
            raise RuntimeError(f"llama.cpp refused the request: {answer}")
        return [int(token) for token in answer["tokens"]]


class _Server:
    """A server behind a Unix socket; it ends with this object."""

    def __init__(self, command: list[str]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="gsd-llama-")
        self.path = str(Path(self.folder.name) / "server.sock")
        self.log = Path(self.folder.name) / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--host", self.path],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_end_with_parent,
            )
        until = time.monotonic() + LOAD_SECONDS
        while time.monotonic() < until:
            if self.process.poll() is not None:
                said = self.log.read_text(encoding="utf-8", errors="replace")
                said = " ".join(said.split())[-200:] or "said nothing"
                raise RuntimeError(f"llama-server ended with exit status {self.process.returncode}: {said}")
            try:
                if self.ask("/health")[0] == 200:
                    return
            except (OSError, ValueError):  # of a server that loads
                pass
            time.sleep(0.05)
        raise RuntimeError(f"llama-server did not load its model within {LOAD_SECONDS:.0f} s")

    def ask(self, path: str, request: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Its status and what it answers, to a request by POST."""
        with closing(http.client.HTTPConnection("localhost")) as connection:
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)  # which it then opens none for
            connection.sock.connect(self.path)
            method, body = ("GET", None) if request is None else ("POST", json.dumps(request))
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


def _end_with_parent() -> None:
    """Have Linux end the server with the process that asks it, however that ends."""
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
