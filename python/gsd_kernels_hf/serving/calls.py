"""One request on its way: from the handler that reads it to the thread that decodes it, and back."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from ..api import Patch

log = logging.getLogger(__name__)


class ClientGoneError(Exception):
    """Ends the decoding of a text that nobody waits for."""


class StoppingError(RuntimeError):
    """Ends the decoding of all texts, because the server stops."""


@dataclass(eq=False)
class Call:
    """A request's seed and, once it is decoded, its statistics.

    Attributes:
        seed: of the request; ``None``: a new one.
        names_length: whether the request says how long the text may be.
        gone: set once the client has closed its connection.
        statistics: of the decoding, plain data.
        since: when the request came, by ``time.perf_counter``.
    """

    seed: int | None = None
    names_length: bool = True
    gone: threading.Event = field(default_factory=threading.Event)
    statistics: dict[str, Any] | None = None
    since: float = field(default_factory=time.perf_counter)


class Listener:
    """A streamer between a decoding and the one of its request, if that has one.

    Every token is an occasion to end the decoding. ``end`` is passed on once the statistics are there, as the last
    event of a stream carries them.
    """

    def __init__(self, call: Call, stopping: threading.Event, inner: Any = None) -> None:
        self.call, self.stopping, self.inner = call, stopping, inner

    def put(self, value: Tensor) -> None:
        if self.call.gone.is_set():
            raise ClientGoneError
        if self.stopping.is_set():
            raise StoppingError("the server is stopping")
        if self.inner is not None:
            self.inner.put(value)

    def end(self) -> None:
        """Wait for :meth:`Decoding.generate`."""


class Decoding:
    """The ``model`` of one request, of which transformers' server calls ``generate`` alone.

    Args:
        handle: the patched model's.
        call: the request.
        name: of the request in the log.
        stopping: set when the server stops.
    """

    def __init__(self, handle: Patch, call: Call, name: str, stopping: threading.Event) -> None:
        self.handle, self.call, self.name, self.stopping = handle, call, name, stopping

    def generate(self, **kwargs: Any) -> Tensor:
        """Decode, on the thread of all decodings.

        Raises:
            TypeError, ValueError: the request cannot be served.
            ClientGoneError, StoppingError: nobody waits for the text.
        """
        begun = time.perf_counter()
        inner = kwargs.pop("streamer", None)
        prompt = kwargs["input_ids"].shape[1]
        if not self.call.names_length:
            self._shorten(kwargs["generation_config"], prompt)
        # transformers' server seeds torch when a request comes; until its turn others may have drawn.
        seed = secrets.randbits(63) if self.call.seed is None else self.call.seed
        try:
            streamer = Listener(self.call, self.stopping, inner)
            output = self.handle.model.generate(**kwargs, seed=seed, streamer=streamer)
        except Exception as error:
            # The server's own streamer may be told a moment before the call is.
            away = self.call.gone.is_set() or type(error).__name__ == "_GenerationCancelled"
            reason = "the client went away" if away else " ".join(str(error).split()) or type(error).__name__
            log.warning("%s ended after %.2f s: %s", self.name, time.perf_counter() - begun, reason)
            raise
        self._count(prompt, queued=begun - self.call.since)
        if inner is not None:
            inner.end()
        return output

    def _shorten(self, config: GenerationConfig, prompt: int) -> None:
        """Take transformers' default length only as far as the model goes; its server reads the end's reason there."""
        positions = getattr(self.handle.model.config, "max_position_embeddings", None)
        if positions is not None:
            config.max_new_tokens = max(1, min(config.max_new_tokens, positions - prompt))

    def _count(self, prompt: int, queued: float) -> None:
        stats = self.handle.stats  # of this thread
        self.call.statistics = {**stats.as_dict(), "queued": queued}
        log.info(
            "%s: %d + %d tokens, %d steps, %.2f tokens a step, %.2f s, queued %.2f s",
            self.name,
            prompt,
            stats.new_tokens,
            stats.steps,
            stats.tokens_per_step,
            stats.seconds["total"],
            queued,
        )
