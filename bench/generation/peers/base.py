"""An engine as the race sees it: how its files are made, and how it decodes, in a process of its own.

Its threads and its memory are not torch's then, and it may die without us.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Setting:
    """A way of decoding: ``plain``, with the ``draft``, or by ``lookup`` in the text; drafting ``tokens`` at a time.

    Attributes:
        mode: of a lookup, where the engine has several.
        round: of the race; what remembers earlier texts begins a round without them.
    """

    kind: str
    tokens: int = 0
    mode: str = ""
    round: int = 0

    def __str__(self) -> str:
        return f"{self.mode} {self.tokens}".strip()


#: kind → numbers of drafted tokens to choose from
TOKENS = {"plain": (0,), "draft": (3, 5, 8), "lookup": (3, 5, 10)}


@dataclass(frozen=True)
class Place:
    """The arguments of a decoding process.

    Attributes:
        folder: what :meth:`Engine.prepare` wrote.
        dtype: of weights, arithmetic and cache: ``float32`` or ``bfloat16``.
        threads: torch's, for the engine too.
        longest: tokens of the longest text, the new ones among them.
        ends: tokens that end a text; none of them: all texts have the same length.
    """

    folder: Path
    dtype: str
    threads: int
    longest: int
    ends: tuple[int, ...] = ()


class Engine(Protocol):
    """One engine. It is pickled to its process, where only :meth:`start` is called, and :meth:`about`.

    Attributes:
        name: of its plain decoding; the others are ``name-draft`` and ``name-lookup``.
        packages: modules without which it is missing.
    """

    name: str
    packages: tuple[str, ...]

    def prepare(self, target: PreTrainedModel, draft: PreTrainedModel | None, folder: Path) -> None:
        """Write both models to ``folder`` as the engine reads them."""

    def choices(self, kind: str) -> list[Setting]:
        """Settings to choose from, on prompts that are not reported."""
        return [Setting(kind, tokens) for tokens in TOKENS[kind]]

    def weight_bytes(self, folder: Path) -> int | None:
        """Of the target in ``folder``, as they are read for a token; ``None``: as many as in the torch model."""

    def start(self, place: Place) -> Any:
        """The engine at work: it opens a setting once, with all that this needs, and decodes by it.

        ``decode(setting, ids, new_tokens)`` gives as many tokens greedily, or up to one that ends the text, which may
        be among them.
        """

    def about(self) -> str:
        """Name the version, and what the engine found of the CPU where it says so."""


_running: list[Any] = []  # in an engine's process: the engine at work


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
