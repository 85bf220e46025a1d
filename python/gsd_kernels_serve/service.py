"""The one model that is served: its queue, and what endpoints ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncIterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse
from transformers import GenerationConfig, PreTrainedTokenizerBase

from gsd_kernels_cli.pair import BAD_CHAT
from gsd_kernels_hf.api import Patch
from gsd_kernels_hf.model import properties

from . import fields
from .answers import Answer, Answers
from .calls import Call, ClientGoneError, Piece, Request, StoppingError, Writer
from .checks import Refused, one_line
from .decoding import Queue
from .limits import Limits
from .logprobs import Pieces
from .messages import check_shown
from .preparing import BusyError, Preparing, in_loop
from .processors import Grammars

T = TypeVar("T")

Waiting = asyncio.Queue[Piece | Exception | None]
"""``None`` once a text has begun, its pieces, and at its end ``None``; an error in their place ends them."""

DEFAULT_TOKENS = 1024
"""Tokens of a text whose request does not say how many."""

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


class Events(StreamingResponse):
    """The events of a stream.

    Whoever leaves while one is being sent is not noticed by what makes them: that is not within an ``await`` then.

    Args:
        events: of it.
        gone: set once nobody reads them any more.
    """

    def __init__(self, events: AsyncIterator[str], gone: threading.Event) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.gone = gone

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.gone.set()


class Service:
    """A patched model, for endpoints.

    Args:
        name: by which clients ask for it.
        handle: what :func:`gsd_kernels.patch` gave.
        tokenizer: the model's.
        stopping: set when the server stops.
        limits: of requests.
    """

    def __init__(
        self,
        name: str,
        handle: Patch,
        tokenizer: PreTrainedTokenizerBase,
        stopping: threading.Event,
        limits: Limits,
    ) -> None:
        self.name, self.model, self.tokenizer, self.limits = name, handle.model, tokenizer, limits
        self.prepare, self.compile = Preparing(limits.seconds, 4), Preparing(limits.seconds, 2)
        self.queue, self.stopping = Queue(handle, tokenizer), stopping
        self.vocabulary = properties.vocabulary(handle.model)
        self.grammars = Grammars(tokenizer, self.vocabulary)
        self.pieces, self.answers = Pieces(tokenizer), Answers(tokenizer, handle.model)
        self.longest = max(map(len, tokenizer.get_vocab()))

    def checked(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a request that are to be honoured.

        Raises:
            Refused: one that is not served, another model among them.
        """
        kept = fields.check(endpoint, body)
        if (name := kept.get("model")) not in (None, self.name):
            raise NoModelError("model", f"Server is pinned to '{self.name}'; requested '{name}'.")
        return kept

    def fitted(self, config: GenerationConfig, prompt: int, source: str, *, length: bool) -> GenerationConfig:
        """The config of a text behind ``prompt`` tokens; where no length is named, it ends where the positions do.

        A named length goes beyond them, as ``generate`` does.

        Args:
            config: of all texts of the request.
            prompt: tokens of the text's.
            source: the field of the prompt.
            length: whether the request names one.

        Raises:
            Refused: no length is named, and the prompt leaves no room; or it is beyond the server's bound.
        """
        config, positions = deepcopy(config), properties.positions(self.model)
        if not length:
            config.max_new_tokens = max(config.max_new_tokens or 0, DEFAULT_TOKENS)
            if positions is not None:
                if prompt >= positions:
                    reason = f"{prompt} tokens leave no room in the model's {positions} positions"
                    raise Refused(source, f"{reason}; shorten it, or name a length to go beyond them")
                config.max_new_tokens = min(config.max_new_tokens, positions - prompt)
        if prompt > (most := self.limits.tokens(positions)):
            raise Refused(source, f"{prompt} tokens; this server reads {most} (--max-prompt): shorten it")
        return config

    async def hold(self, request: Request) -> None:
        """Compile the schema that the texts of a request are held to, if there is one.

        Raises:
            Refused: it cannot be, or takes too long.
        """
        if request.held is not None:
            schema, field = request.held
            request.grammar = await self.compile(field, self.grammars.of, schema, field, request.ends)

    def templated(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], arguments: dict[str, Any], field: str
    ) -> list[int]:
        """The tokens of a chat, to its answer's beginning.

        Raises:
            Refused: the template does not take it, or leaves something out; named ``field``.
        """
        check_shown(self.tokenizer, messages, field)
        try:
            written = self.tokenizer.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=True, tokenize=False, **arguments
            )
        except BAD_CHAT as error:
            raise Refused(field, f"the chat template: {one_line(error)}") from error
        return self.tokens(written, field, add_special_tokens=False)

    def tokens(self, text: str, field: str, **options: Any) -> list[int]:
        """The tokens of a text that are not certainly too many.

        Raises:
            Refused: even of the longest tokens there are; named ``field``.
        """
        most = self.limits.tokens(properties.positions(self.model))
        if len(text) > min(most * self.longest, self.limits.body):
            raise Refused(field, f"{len(text)} characters; this server reads {most} tokens (--max-prompt): shorten it")
        return list(self.tokenizer(text, **options)["input_ids"])

    async def begin(self, call: Call, answer: Answer | None) -> Waiting:
        """Have a text decoded and read by ``answer``, and wait for its beginning; :meth:`pieces_of` gives the rest.

        Raises:
            TypeError, ValueError: the request cannot be served.
            ClientGoneError, StoppingError: nobody waits for the text.
        """
        waiting: Waiting = asyncio.Queue()
        send = partial(in_loop, asyncio.get_running_loop(), waiting.put_nowait)
        writer = Writer(call, self.tokenizer, self.stopping, answer, send)
        waits = weakref.ref(writer)  # until its turn a text whose client goes holds nothing

        def run() -> None:
            try:
                if (writer := waits()) is not None:
                    self.queue.decode(writer)
                    send(None)
            except Exception as error:
                send(error)

        self.queue.submit(run)
        async for _ in self.pieces_of(waiting):
            pass
        return waiting

    @staticmethod
    async def pieces_of(waiting: Waiting) -> AsyncIterator[Piece]:
        """The pieces of a text, as it is decoded; its error is raised."""
        while (piece := await waiting.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    @contextlib.asynccontextmanager
    async def connected(self, gone: threading.Event, http: HttpRequest) -> AsyncIterator[None]:
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


_STATUS: dict[type[BaseException], tuple[int, str | None]] = {
    Refused: (400, None),
    NoModelError: (404, "model_not_found"),
    ClientGoneError: (499, None),
    StoppingError: (503, None),
    BusyError: (503, None),
}
"""The status and OpenAI's code of the server's own errors."""


def answer_of(error: BaseException, endpoint: str | None = None) -> tuple[int, dict[str, Any]]:
    """The status and the body of an error, as OpenAI's clients read it and as FastAPI gives it."""
    message, field = one_line(error), error.field if isinstance(error, Refused) else None
    status, code = _STATUS.get(type(error), (500, None))
    if isinstance(error, RequestValidationError):  # no JSON object, or an argument of another route is missing
        status = 400
        message = "; ".join(f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in error.errors())
    elif isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, asyncio.CancelledError):  # after the time that uvicorn gives to requests as it stops
        status, message = 503, "the server is stopping"
    elif status == 500 and isinstance(error, (ValueError, TypeError)):  # of generate
        field = _field_of(message, endpoint)
        status = 400 if field else 500
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": message, "type": kind, "param": field, "code": code}, "detail": message}


def _field_of(message: str, endpoint: str | None) -> str | None:
    """The field that an error of ``generate`` begins with."""
    known = fields.rows(endpoint or "")
    name = message.partition(":")[0]
    return next((field for field in _FIELDS.get(name, (name,)) if field in known), None)
