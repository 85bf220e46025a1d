"""The server of one patched model, and the way in: a body is read whole, within bounds, before anything looks at it."""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.model_manager import ModelManager

from gsd_kernels_hf.api import Patch

from .checks import Json, text
from .endpoints import Chat, Completions, Responses
from .limits import READ_SECONDS, Limits, name_of
from .service import THREAD, NoModelError, Service, answer_of

log = logging.getLogger(__name__)

STOP_SECONDS = 2
"""Seconds that running requests have after Ctrl-C; then they end with an error."""

SWITCH_SECONDS = 2e-4
"""After which a thread of Python's code lets others go on, in a process that serves.

Under Python's 5 ms, a token of another request, which takes the interpreter's lock some twenty times, takes a second
beside a slow template, and an event waits for a text's processors.
"""


class Door:
    """ASGI middleware: bodies have a size and a time, requests a number and a name.

    Errors are answered here, within what adds the headers that web pages need; those of the server itself are logged.

    Args:
        app: the application.
        limits: of all requests.
        hosts: names of this machine; a page of another name, which its owner lets point here, is sent away.
    """

    def __init__(self, app: Any, limits: Limits, hosts: Sequence[str] | None = None) -> None:
        self.app, self.limits = app, limits
        self.hosts = None if hosts is None or "*" in hosts else {host.lower() for host in hosts}
        self.under_way = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, headers = False, {"Connection": "close"}  # where a request is sent away
        given, gone = dict(scope["headers"]), threading.Event()
        name = given.get(b"x-request-id") or str(uuid.uuid4()).encode()
        scope.setdefault("state", {}).update(request_id=name.decode("latin-1"), gone=gone)

        async def sent(message: Any) -> None:
            nonlocal begun
            if not begun:
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name)]
            begun = True
            await send(message)

        posts = scope["method"] == "POST"
        try:
            host = name_of(given.get(b"host", b"").decode("latin-1"))  # without its port
            if self.hosts is not None and host not in self.hosts:
                raise HTTPException(400, f"Host: {host!r} is not this server's name; allow it by --allowed-host")
            try:
                body = await asyncio.wait_for(self._body(receive), READ_SECONDS) if posts else b""
            except asyncio.TimeoutError:
                raise HTTPException(408, f"the body was not sent within {READ_SECONDS:g} s") from None
            if body is None:  # the client is gone
                return
            if posts and self.under_way >= self.limits.requests:
                raise HTTPException(503, f"{self.under_way} requests are under way; try again later (--max-requests)")
            left: list[bytes] = [body]
            del body
            headers.clear()

            async def whole() -> Any:
                return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await receive()

            self.under_way += posts
            try:
                await self.app(scope, whole, sent)
            finally:
                self.under_way -= posts
                gone.set()  # whoever leaves while an event is being sent is not noticed by what makes them
        except (Exception, asyncio.CancelledError) as error:
            if begun:
                raise
            status, answer = answer_of(error, scope["path"])
            if status == 500:
                log.exception("%s failed", scope["path"])
            await JSONResponse(answer, status_code=status, headers=headers)(scope, receive, sent)

    async def _body(self, receive: Any) -> bytes | None:
        """The body, or ``None`` where the client goes away. What is beyond the bound is read and dropped.

        Raises:
            HTTPException: it is too large.
        """
        body, size, more = bytearray(), 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size <= self.limits.body:
                body += part
            else:
                body.clear()
            more = message.get("more_body", False)
        if size > self.limits.body:
            raise HTTPException(413, f"{size:,} bytes; this server takes {self.limits.body:,} (--max-body): send fewer")
        return bytes(body)


async def _refused(_: Request, error: Exception) -> Response:
    """Leave an error to the door."""
    raise error


def make_app(
    name: str,
    handle: Patch,
    tokenizer: PreTrainedTokenizerBase,
    *,
    limits: Limits | None = None,
    origins: Sequence[str] = (),
    hosts: Sequence[str] | None = None,
) -> FastAPI:
    """The application for one patched model.

    Args:
        name: by which clients ask for the model.
        handle: what :func:`gsd_kernels.patch` gave.
        tokenizer: the model's.
        limits: of requests.
        origins: of web pages whose scripts may ask: ``http://localhost:3000``, or ``*`` for all.
        hosts: names that requests call this machine by; ``None``: any.
    """
    service = Service(name, handle, tokenizer, limits or Limits())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.stopping.set()  # so do texts that nobody waits for any more

    own = dict.fromkeys((HTTPException, RequestValidationError), _refused)  # which it would answer by itself
    app = FastAPI(lifespan=lifespan, openapi_url=None, exception_handlers=own)
    for endpoint in (Chat(service), Completions(service), Responses(service)):
        app.post(endpoint.endpoint)(endpoint.handle_request)

    # The model: as OpenAI tells of one, and as ``transformers chat`` has it loaded.
    entry: Json = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "gsd-kernels"}
    entry["status"] = {"value": "loaded"}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.api_route("/v1/models", methods=["GET", "OPTIONS"])
    async def models() -> Json:
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{asked:path}")
    async def model(asked: str) -> Json:
        if asked != name:
            raise NoModelError("model", f"there is no {asked!r}; {name!r} is served")
        return entry

    @app.post("/load_model")
    async def load_model(body: Json) -> Response:
        text("model", body.get("model"))
        asked, own = map(ModelManager.process_model_name, (body["model"], name))
        status: Json = {"status": "ready", "model": own, "cached": True}
        if asked != own:
            status = {"status": "error", "model": asked, "message": f"only {name} is served"}
        return Response(f"data: {json.dumps(status)}\n\n", media_type="text/event-stream")

    app.add_middleware(Door, limits=service.limits, hosts=hosts)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    app.state.service = service
    return app


class _Server(uvicorn.Server):
    """uvicorn's server; after a signal, requests end by themselves before uvicorn cancels them."""

    interrupted = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.interrupted |= sig == signal.SIGINT
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(STOP_SECONDS, self.config.app.state.service.stopping.set)
        await super().shutdown(sockets)


def run(app: FastAPI, where: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; running requests have :data:`STOP_SECONDS` seconds then."""
    config = deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["loggers"][__package__] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
    server = _Server(uvicorn.Config(app, log_config=config, timeout_graceful_shutdown=5 * STOP_SECONDS))
    try:
        server.run(sockets=[where])
        if server.interrupted:  # uvicorn raises the signal again as its loop ends, which a task may then swallow
            raise KeyboardInterrupt
    finally:
        service = app.state.service
        service.stopping.set()
        if not service.queue.wait(STOP_SECONDS) or any(thread.name == THREAD for thread in threading.enumerate()):
            # Compiled code that returns into an interpreter which is going down aborts the process.
            atexit.register(_leave, 128 + signal.SIGINT if server.interrupted else 0)


def _leave(code: int) -> None:
    """End the process as it is, with threads that go on."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
