"""Python processes that start at once: forks of one that has imported what all of them need, and run nothing else.

A fork runs a script or a module as ``python`` would, in an environment of its own, and ends as an interpreter ends, but
for taking all that was imported apart, which takes as long as many a test.
Importing torch, transformers and this package takes seconds, which most tests of several processes do not test.

``python forked.py`` is the process that forks. It reads requests, lines of JSON, and answers each by one.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

MODULES = (
    *("torch.distributed.tensor.parallel", "accelerate", "transformers.models.llama.modeling_llama"),
    *("transformers.integrations.tensor_parallel", "transformers.generation.candidate_generator"),
    *("gsd_kernels_hf.api", "gsd_kernels_cli.app", "gsd_kernels_bench.cli", "gsd_kernels_bench.generation.generate"),
    "matplotlib.pyplot",
)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Forks:
    """The process that forks, seen from a test."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ask()  # it has imported everything, and has one thread

    def ask(self, **request: Any) -> Any:
        """The answer to one request."""
        assert self._server.stdin and self._server.stdout
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def start(self, command: Sequence[str], out: Path, errors: Path, **environment: str) -> Fork:
        """``python COMMAND``, which is a script or ``-m MODULE`` and its arguments; it reads nothing."""
        given = {**os.environ, **ENVIRONMENT, **environment}
        pid = self.ask(command=list(command), out=str(out), errors=str(errors), environment=given, cwd=os.getcwd())
        return Fork(self, pid)

    def close(self) -> None:
        self._server.communicate(timeout=60)


class Fork:
    """One process: as much of :class:`subprocess.Popen` as tests use."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self.forks, self.pid, self.returncode = forks, pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.forks.ask(pid=self.pid)
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        """Exit status, negative for a signal.

        Raises:
            TimeoutError: it has not ended after ``timeout`` seconds.
        """
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"process {self.pid} runs for more than {timeout:.0f} s")
            time.sleep(0.02)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def serve() -> dict[str, Any] | None:
    """Answer requests until they end; in a fork, what it is to run."""
    running: set[int] = set()
    for line in sys.stdin:
        request, answer = json.loads(line), None
        if "command" in request:
            answer = os.fork()
            if answer == 0:
                return request
            running.add(answer)
        elif request.get("pid") in running:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            running -= {pid}
        print(json.dumps(answer), flush=True)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return None


def become(request: dict[str, Any]) -> None:
    """Run what a fork was started for."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    for number, path in enumerate((os.devnull, request["out"], request["errors"])):
        with open(path, "wb" if number else "rb") as file:
            os.dup2(file.fileno(), number)
    sys.stdin = os.fdopen(0, closefd=False)
    module = request["command"][0] == "-m"
    name, *sys.argv[1:] = request["command"][module:]
    sys.argv[0] = name
    if module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")


def status_of(run: Callable[[], object]) -> int:
    """What an interpreter that did ``run`` and nothing else would exit with, once it has said why."""
    try:
        run()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def leave(status: int) -> NoReturn:
    """End as an interpreter does: wait for threads, call what was to be called at the end, write what waits."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__":
    gc.disable()  # for what is imported stays
    for module in MODULES:
        importlib.import_module(module)
    faulthandler.enable()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise SystemExit(f"{threads} threads after the imports: a fork would have one of them")
    gc.freeze()  # or every fork's collections look through all that was imported, and copy its pages
    gc.enable()
    asked = serve()
    leave(status_of(lambda: become(asked)) if asked else 0)
