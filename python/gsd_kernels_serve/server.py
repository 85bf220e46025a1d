"""transformers' server around one patched model."""

from __future__ import annotations

import asyncio
import atexit
import inspect
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
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerationState

from gsd_kernels_hf.api import Patch

from .checks import text
from .door import Door
from .limits import Limits
from .preparing import THREAD
from .responses import Responses
from .service import ERRORS, NoModelError, Service, answer_of
from .texts import Chat, Completions

STOP_SECONDS = 2
"""Seconds that running requests have after Ctrl-C; then they end with an error."""

SWITCH_SECONDS = 2e-4
"""After which a thread of Python's code lets others go on, while an application lives.

Under Python's 5 ms, a token of another request, which takes the interpreter's lock some twenty times, takes a second
beside a slow template, and an event waits for a text's processors.
"""

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health")
"""Of transformers' server; the others load or drop models, or are for other kinds of models."""


class OneModel:
    """A manager of models as transformers' application asks it, of one that is loaded already and stays.

    Args:
        name: by which clients ask for it.
        stopping: set when the server stops.
    """

    def __init__(self, name: str, stopping: threading.Event) -> None:
        self.stopping = stopping
        self.entry = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "gsd-kernels",
            "status": {"value": "loaded"},
        }

    def list_models(self) -> list[dict[str, Any]]:
        """The one."""
        return [self.entry]

    def shutdown(self) -> None:
        """Called when the server ends: so do texts that nobody waits for any more."""
        self.stopping.set()


async def _refused(request: Request, error: Exception) -> Response:
    """An error as an answer; one of the server itself is left to the door."""
    status, answer = answer_of(error, request.url.path)
    if status == 500:
        raise error
    return JSONResponse(answer, status_code=status)


async def _no_object(request: Request, error: RequestValidationError) -> Response:
    """The body is no JSON object, or an argument of another route is missing."""
    reason = "; ".join(f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in error.errors())
    return await _refused(request, HTTPException(400, reason))


def _add_routes(app: FastAPI, entry: dict[str, Any]) -> None:
    """Of OpenAI's routes the one that transformers' application has not, and the one that takes any name there."""

    @app.post("/load_model")
    async def load_model(body: dict[str, Any]) -> Response:
        text("model", body.get("model"))
        name, own = map(ModelManager.process_model_name, (body["model"], entry["id"]))
        status: dict[str, Any] = {"status": "ready", "model": own, "cached": True}
        if name != own:
            status = {"status": "error", "model": name, "message": f"only {entry['id']} is served"}
        return Response(f"data: {json.dumps(status)}\n\n", media_type="text/event-stream")

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != entry["id"]:
            raise NoModelError("model", f"there is no {name!r}; {entry['id']!r} is served")
        return JSONResponse(entry)


def _take_turns(app: FastAPI) -> None:
    """Have threads take turns sooner while the application lives; the process's own interval comes back."""
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        own = sys.getswitchinterval()
        sys.setswitchinterval(min(own, SWITCH_SECONDS))
        try:
            async with inner(app) as state:
                yield state
        finally:
            sys.setswitchinterval(own)

    app.router.lifespan_context = lifespan


def make_app(
    name: str,
    handle: Patch,
    tokenizer: PreTrainedTokenizerBase,
    *,
    speculates: bool = True,
    limits: Limits | None = None,
    origins: Sequence[str] = (),
    hosts: Sequence[str] | None = None,
) -> FastAPI:
    """transformers' application for one patched model.

    Args:
        name: by which clients ask for the model.
        handle: what :func:`gsd_kernels.patch` gave.
        tokenizer: the model's.
        speculates: whether the model drafts; where it decodes plainly, a text with ``prediction`` drafts all the same.
        limits: of requests.
        origins: of web pages whose scripts may ask: ``http://localhost:3000``, or ``*`` for all.
        hosts: names that requests call this machine by; ``None``: any.

    Raises:
        ImportError: this transformers' server wants parts that are unknown here.
    """
    stopping, limits = threading.Event(), limits or Limits()
    service = Service(name, handle, tokenizer, stopping, speculates, limits)
    manager = OneModel(name, stopping)
    parts: dict[str, Any] = {
        "model_manager": manager,
        "chat_handler": Chat(service),
        "completion_handler": Completions(service),
        "response_handler": Responses(service),
        "transcription_handler": None,
        "systemone_handler": None,
        "generation_state": GenerationState(),
    }
    wanted = inspect.signature(build_server).parameters
    unknown = [p.name for p in wanted.values() if p.default is p.empty and p.name not in parts]
    if unknown:
        raise ImportError(f"serve: this transformers' server wants {', '.join(unknown)}; 5.15 to 5.24 do not")
    app = build_server(**{part: value for part, value in parts.items() if part in wanted})
    app.router.routes[:] = [route for route in app.router.routes if route.path in ROUTES]
    _add_routes(app, manager.entry)
    _take_turns(app)
    app.add_middleware(Door, limits=limits, hosts=hosts)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
    for error in (HTTPException, *ERRORS):
        app.add_exception_handler(error, _refused)
    app.add_exception_handler(RequestValidationError, _no_object)
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
