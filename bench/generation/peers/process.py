"""A process for one engine: its threads and its memory are not torch's, and it may die without us."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from .base import Engine, Place, Runner, Setting

_running: list[Runner] = []  # in an engine's process: the engine at work


class EngineProcess:
    """Decodes with ``engine`` in a fresh process, which imports neither torch nor transformers."""

    def __init__(self, engine: Engine, place: Place) -> None:
        self.engine, self.place = engine, place
        context = multiprocessing.get_context("spawn")
        self.executor = ProcessPoolExecutor(1, context, _start, (engine, place))

    def decode(self, setting: Setting, ids: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
        """The new tokens, and the seconds of decoding alone.

        Raises:
            RuntimeError: there are not ``new_tokens`` of them though no text ends early, or the process died.
        """
        tokens, seconds = self.executor.submit(_decode, setting, list(ids), new_tokens).result()
        if len(tokens) != new_tokens and not (self.place.ends and 0 < len(tokens) < new_tokens):
            raise RuntimeError(f"{self.engine.name} gave {len(tokens)} tokens of {new_tokens}")
        return tokens, seconds

    def about(self) -> str:
        """Facts that the engine states of itself."""
        return self.executor.submit(self.engine.about).result()

    def close(self) -> None:
        self.executor.shutdown(cancel_futures=True)


def _start(engine: Engine, place: Place) -> None:
    """Leave Ctrl-C to the race's process, and end with it: one that is killed closes nothing, and models are large."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    _running.append(engine.start(place))


def _decode(setting: Setting, ids: list[int], new_tokens: int) -> tuple[list[int], float]:
    (runner,) = _running
    runner.open(setting)
    begin = time.perf_counter()
    tokens = runner.decode(setting, ids, new_tokens)
    return tokens, time.perf_counter() - begin
