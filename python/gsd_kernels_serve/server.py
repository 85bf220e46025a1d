"""The server of one patched model."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import signal
import socket
import sys
import threading
import time
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

from .checks import text
from .door import Door
from .limits import Limits
from .preparing import THREAD
from .responses import Responses
from .service import NoModelError, Service, answer_of
from .texts import Chat, Completions

STOP_SECONDS = 2
"""Seconds that running requests have after Ctrl-C; then they end with an error."""

SWITCH_SECONDS = 2e-4
"""After which a thread of Python's code lets others go on, in a process that serves.

Under Python's 5 ms, a token of another request, which takes the interpreter's lock some twenty times, takes a second
beside a slow template, and an event waits for a text's processors.
"""


async def _refused(request: Request, error: Exception) -> Response:
    """An error of a request as an answer; all others are the door's to answer."""
    status, answer = answer_of(error, request.url.path)
    return JSONResponse(answer, status_code=status)


def _add_models(app: FastAPI, name: str) -> None:
    """Routes that tell of the model: as OpenAI's, and as ``transformers chat`` has it loaded."""
    entry: dict[str, Any] = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "gsd-kernels"}
    entry["status"] = {"value": "loaded"}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.api_route("/v1/models", methods=["GET", "OPTIONS"])
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{asked:path}")
    async def model(asked: str) -> dict[str, Any]:
        if asked != name:
            raise NoModelError("model", f"there is no {asked!r}; {name!r} is served")
        return entry

    @app.post("/load_model")
    async def load_model(body: dict[str, Any]) -> Response:
        text("model", body.get("model"))
        asked, own = map(ModelManager.process_model_name, (body["model"], name))
        status: dict[str, Any] = {"status": "ready", "model": own, "cached": True}
        if asked != own:
            status = {"status": "error", "model": asked, "message": f"only {name} is served"}
        return Response(f"data: {json.dumps(status)}\n\n", media_type="text/event-stream")


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
    stopping, limits = threading.Event(), limits or Limits()
    service = Service(name, handle, tokenizer, stopping, limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        stopping.set()  # so do texts that nobody waits for any more

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    for endpoint in (Chat(service), Completions(service), Responses(service)):
        app.post(endpoint.endpoint)(endpoint.handle_request)
    _add_models(app, name)
    app.add_middleware(Door, limits=limits, hosts=hosts)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    for error in (HTTPException, RequestValidationError):  # which the application would answer by itself
        app.add_exception_handler(error, _refused)
    app.state.queue, app.state.stopping = service.queue, stopping
    return app


class _Server(uvicorn.Server):
    """uvicorn's server; after a signal, requests end by themselves before uvicorn cancels them."""

    interrupted = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.interrupted |= sig == signal.SIGINT
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(STOP_SECONDS, self.config.app.state.stopping.set)
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
        app.state.stopping.set()
        if not app.state.queue.wait(STOP_SECONDS) or any(thread.name == THREAD for thread in threading.enumerate()):
            # Compiled code that returns into an interpreter which is going down aborts the process.
            atexit.register(_leave, 128 + signal.SIGINT if server.interrupted else 0)


def _leave(code: int) -> None:
    """End the process as it is, with threads that go on."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
