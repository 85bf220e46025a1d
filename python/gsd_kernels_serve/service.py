"""The one model that is served: its queue, and what endpoints ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase

from gsd_kernels_hf.api import Patch
from gsd_kernels_hf.model import properties

from . import fields
from .answers import Answers
from .calls import ClientGoneError, Piece, Queue, StoppingError
from .checks import Json, Refused, one_line
from .limits import Limits
from .logprobs import Pieces
from .schemas import Grammars

T = TypeVar("T")

Waiting = asyncio.Queue[Piece | Exception | None]
"""``None`` once a text has begun, its pieces, and at its end ``None``; an error in their place ends them."""

_FIELDS = {
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "reference_ids": ("prediction",),
    "sequence_bias": ("logit_bias",),
    "stop_strings": ("stop",),
    "input_ids": tuple(fields.NEEDED.values()),
}
"""What ``generate`` calls a field."""


class NoModelError(Refused):
    """Another model than the one that is served is asked for."""


class Service:
    """A patched model, for endpoints.

    Args:
        name: by which clients ask for it.
        handle: what :func:`gsd_kernels.patch` gave.
        tokenizer: the model's.
        limits: of requests.

    Attributes:
        stopping: set when the server stops.
        positions: of the model, or ``None``.
        most: tokens of a prompt.
        longest: characters of a token.
    """

    def __init__(
        self,
        name: str,
        handle: Patch,
        tokenizer: PreTrainedTokenizerBase,
        limits: Limits,
    ) -> None:
        self.name, self.model, self.tokenizer, self.limits = name, handle.model, tokenizer, limits
        self.prepare, self.compile = Preparing(limits.seconds, 4), Preparing(limits.seconds, 2)
        self.queue, self.stopping = Queue(handle, tokenizer), threading.Event()
        self.vocabulary = properties.vocabulary(handle.model)
        self.grammars = Grammars(tokenizer, self.vocabulary)
        self.pieces, self.answers = Pieces(tokenizer), Answers(tokenizer, handle.model)
        self.positions = properties.positions(handle.model)
        self.most = limits.prompt or (131_072 if self.positions is None else 2 * self.positions)
        self.longest = max(map(len, tokenizer.get_vocab()))

    def tokens(self, text: str, field: str, **options: Any) -> list[int]:
        """The tokens of a text that are not certainly too many.

        Raises:
            Refused: even of the longest tokens there are; named ``field``.
        """
        if len(text) > min(self.most * self.longest, self.limits.body):
            raise Refused(
                field, f"{len(text)} characters; this server reads {self.most} tokens (--max-prompt): shorten it"
            )
        return list(self.tokenizer(text, **options)["input_ids"])


async def pieces_of(waiting: Waiting) -> AsyncIterator[Piece]:
    """The pieces of a text, as it is decoded; its error is raised."""
    while (piece := await waiting.get()) is not None:
        if isinstance(piece, Exception):
            raise piece
        yield piece


@contextlib.asynccontextmanager
async def connected(gone: threading.Event, http: HttpRequest) -> AsyncIterator[None]:
    """Watch the connection of a request that is no stream meanwhile; what the client sent has been read.

    Raises:
        ClientGoneError: the client closed it. Whatever is waited for within ends at once; its place is free.
    """
    waiter = asyncio.current_task()
    assert waiter is not None

    async def watch() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        gone.set()
        waiter.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not gone.is_set():
            raise
        if hasattr(waiter, "uncancel"):  # from Python 3.11 on
            waiter.uncancel()
        raise ClientGoneError from None
    finally:
        watching.cancel()


THREAD = "gsd_kernels request"
"""Name of the threads that read requests."""


class Preparing:
    """Reads requests beside the event loop: templates, tokens and schemas take as long as a client makes them.

    Args:
        seconds: after which nobody waits for a function any more; it goes on, and keeps its place until it is over.
        places: functions at once, each in a thread of its own.
    """

    def __init__(self, seconds: float, places: int) -> None:
        self.seconds = seconds
        self.places = asyncio.Semaphore(places)

    async def __call__(self, field: str, function: Callable[..., T], *args: Any) -> T:
        """Return what ``function(*args)`` returns.

        Raises:
            Refused: it takes too long; the error names ``field``.
            HTTPException: other requests took all places for as long, or the system gives no thread.
        """
        loop = asyncio.get_running_loop()
        outcome: Future[T] = Future()
        outcome.set_running_or_notify_cancel()  # nobody takes it back: whoever waits no more is not told

        def run(outcome: Future[T]) -> None:
            try:
                outcome.set_result(function(*args))
            except Exception as error:
                outcome.set_exception(error)
            finally:
                del outcome  # as below; also where nobody waits any more
                in_loop(loop, self.places.release)

        try:
            await asyncio.wait_for(self.places.acquire(), self.seconds)
        except asyncio.TimeoutError:
            raise HTTPException(503, "other requests are being read; try again later") from None
        try:
            threading.Thread(target=run, args=(outcome,), daemon=True, name=THREAD).start()
        except RuntimeError as error:
            self.places.release()
            raise HTTPException(503, f"{error}; try again later") from error
        try:
            return await asyncio.wait_for(asyncio.wrap_future(outcome), self.seconds)
        except asyncio.TimeoutError:
            reason = f"takes more than {self.seconds:g} s to read; make it shorter or simpler (--max-seconds)"
            raise Refused(field, reason) from None
        finally:
            del outcome  # an error would have itself among the variables of its traceback


def in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *args: Any) -> None:
    """Have an event loop call a function, from another thread; a loop that is closed hears nothing."""
    with contextlib.suppress(RuntimeError):  # the server has ended
        loop.call_soon_threadsafe(function, *args)


_STATUS: dict[type[BaseException], tuple[int, str | None]] = {
    Refused: (400, None),
    NoModelError: (404, "model_not_found"),
    ClientGoneError: (499, None),
    StoppingError: (503, None),
}
"""The status and OpenAI's code of the server's own errors."""


def answer_of(error: BaseException, endpoint: str) -> tuple[int, Json]:
    """The status and the body of an error, as OpenAI's clients read it and as FastAPI gives it."""
    message, field = one_line(error), error.field if isinstance(error, Refused) else None
    status, code = _STATUS.get(type(error), (500, None))
    if isinstance(error, RequestValidationError):  # no JSON object, or an argument of another route is missing
        status = 400
        message = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
    elif isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, asyncio.CancelledError):  # after the time that uvicorn gives to requests as it stops
        status, message = 503, "the server is stopping"
    elif status == 500 and isinstance(error, (ValueError, TypeError)):  # of generate, which begins with its argument
        known, name = fields.rows(endpoint), message.partition(":")[0]
        field = next((field for field in _FIELDS.get(name, (name,)) if field in known), None)
        status = 400 if field else 500
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": message, "type": kind, "param": field, "code": code}, "detail": message}
