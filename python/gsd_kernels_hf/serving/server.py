"""transformers' server around one patched model."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import json
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from copy import deepcopy
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerateManager, GenerationState

from ..api import Patch
from .calls import Call, ClientGoneError, Decoding, StoppingError

PATIENCE = 2
"""Seconds that running requests have after Ctrl-C; then they end with an error."""

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health", "/load_model")
"""Of transformers' server; the others load or drop models, or are for other kinds of models."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
}
"""Fields that transformers' server ignores, and the values with which that changes nothing; null is another."""

LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "generation_config")
"""Fields that limit the length of a text; without any, transformers' server takes 1,024 tokens."""

_call: ContextVar[Call] = ContextVar("call")
_receive: ContextVar[Any] = ContextVar("receive")


class OneModel(ModelManager):
    """transformers' manager of models with one, which is loaded already and stays.

    Args:
        name: by which clients ask for it.
        model, tokenizer: it.
        stopping: set when the server stops.
    """

    def __init__(
        self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stopping: threading.Event
    ) -> None:
        self.model, self.tokenizer, self.stopping = model, tokenizer, stopping
        self.since = int(time.time())
        super().__init__(force_model=name)

    def load_model_and_processor(
        self, *_: Any, **__: Any
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:  # of the one name that handlers let through
        return self.model, self.tokenizer

    async def load_model_streaming(self, model_id_and_revision: str, **_: Any) -> AsyncIterator[str]:
        own = self.process_model_name(self.force_model)
        found: dict[str, Any] = {"status": "ready", "model": own, "cached": True}
        if model_id_and_revision != own:
            found = {"status": "error", "model": model_id_and_revision, "message": f"only {self.force_model} is served"}
        yield f"data: {json.dumps(found)}\n\n"

    def get_gen_models(self, *_: Any) -> list[dict[str, Any]]:  # type: ignore[override]
        return [{"id": self.force_model, "object": "model", "created": self.since, "owned_by": "gsd-kernels"}]

    def shutdown(self) -> None:
        """Called when the server ends: so do texts that nobody waits for any more."""
        self.stopping.set()


class Queue(GenerateManager):
    """transformers' thread that decodes one request after another; each with its seed and its statistics."""

    def __init__(self, handle: Patch, stopping: threading.Event) -> None:
        self.handle, self.stopping = handle, stopping
        super().__init__()

    def generate_streaming(self, model: Any, *args: Any, request_id: str, **kwargs: Any) -> Any:
        return super().generate_streaming(self._decoding(request_id), *args, request_id=request_id, **kwargs)

    async def generate_non_streaming(self, model: Any, *args: Any, request_id: str, **kwargs: Any) -> Any:
        return await super().generate_non_streaming(self._decoding(request_id), *args, request_id=request_id, **kwargs)

    def _decoding(self, request_id: str) -> Decoding:
        return Decoding(self.handle, _call.get(), request_id, self.stopping)

    def wait(self, seconds: float) -> None:
        """Wait until the thread is idle."""
        with contextlib.suppress(concurrent.futures.TimeoutError):  # TimeoutError itself from Python 3.11 on
            self.submit(lambda: None).result(seconds)


class _OneQueue(GenerationState):
    """transformers' table of queues, with one."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self.queue = queue

    def get_manager(self, model_id: str, use_cb: bool = False) -> Queue:
        return self.queue


class _Handler:
    """What is added to transformers' handlers of text requests."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        for name, harmless in HARMLESS.items():
            if body.get(name) is not None and body[name] not in harmless:
                raise HTTPException(400, f"{name}: {body[name]!r} is not served; leave it out")
        call = Call(seed=body.get("seed"), names_length=any(body.get(name) is not None for name in LENGTHS))
        _call.set(call)
        watching = None if body.get("stream") else asyncio.create_task(_watch(_receive.get(), call))
        try:
            response = await super().handle_request(body, request_id)  # type: ignore[misc]
        except (ValueError, TypeError, KeyError, TemplateError) as error:
            reason = f"missing: {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
            raise HTTPException(400, reason) from error
        except ClientGoneError:
            raise HTTPException(499, "the client went away") from None
        except StoppingError as error:
            raise HTTPException(503, str(error)) from error
        finally:
            if watching is not None:
                watching.cancel()
        if isinstance(response, StreamingResponse):
            response.body_iterator = _events(response.body_iterator, call)
        elif call.statistics is not None:
            return JSONResponse({**json.loads(response.body), "gsd_kernels": call.statistics})
        return response

    def chunk_to_sse(self, chunk: Any) -> str:  # type: ignore[override]
        if getattr(chunk, "usage", None) is not None:  # the last one
            chunk.gsd_kernels = _call.get().statistics
        return super().chunk_to_sse(chunk)  # type: ignore[misc]

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        config = super()._build_generation_config(body, *args, **kwargs)  # type: ignore[misc]
        if body.get("generation_config") is None and (body.get("temperature") or body.get("top_p") is not None):
            config.do_sample = body.get("temperature") != 0
        return config


class _Chat(_Handler, ChatCompletionHandler):
    pass


class _Completion(_Handler, CompletionHandler):
    pass


class _Responses(_Handler, ResponseHandler):
    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        return await super().handle_request({**body, "stream": bool(body.get("stream"))}, request_id)


async def _events(parts: Any, call: Call) -> AsyncIterator[str]:
    """The parts of a stream; errors as OpenAI's clients read them."""
    async with contextlib.aclosing(parts):
        try:
            async for part in parts:
                before, found, message = part.partition(_ERROR)
                yield before + _error_event(message.removesuffix('"}\n\n')) if found else part
        except (GeneratorExit, asyncio.CancelledError):
            call.gone.set()
            raise


_ERROR = 'data: {"error": "'
"""How transformers' streams begin an error; what follows is not escaped."""


def _error(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}, "detail": message}


def _error_event(message: str) -> str:
    return f"data: {json.dumps(_error(400, message))}\n\n"


async def _refused(_: Any, error: HTTPException) -> Response:
    """An answer as OpenAI's clients read it, and as FastAPI gives it."""
    return JSONResponse(_error(error.status_code, str(error.detail)), status_code=error.status_code)


async def _watch(receive: Any, call: Call) -> None:
    """Wait for the client to close its connection; what it sent has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    call.gone.set()


class _Connection:
    """ASGI middleware: handlers of requests see the connection."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        _receive.set(receive)
        await self.app(scope, receive, send)


def make_app(name: str, handle: Patch, tokenizer: PreTrainedTokenizerBase) -> FastAPI:
    """transformers' application for one patched model.

    Args:
        name: by which clients ask for the model.
        handle: what :func:`gsd_kernels.patch` gave.
        tokenizer: the model's.

    Raises:
        ImportError: this transformers' server wants parts that are unknown here.
    """
    stopping = threading.Event()
    queue = Queue(handle, stopping)
    manager, state = OneModel(name, handle.model, tokenizer, stopping), _OneQueue(queue)
    parts: dict[str, Any] = {
        "model_manager": manager,
        "chat_handler": _Chat(manager, state),
        "completion_handler": _Completion(manager, state),
        "response_handler": _Responses(manager, state),
        "transcription_handler": None,
        "systemone_handler": None,
        "generation_state": state,
    }
    wanted = inspect.signature(build_server).parameters
    unknown = [p.name for p in wanted.values() if p.default is p.empty and p.name not in parts]
    if unknown:
        raise ImportError(f"serve: this transformers' server wants {', '.join(unknown)}; 5.6 to 5.23 do not")
    app = build_server(**{part: value for part, value in parts.items() if part in wanted})
    app.router.routes[:] = [route for route in app.router.routes if route.path in ROUTES]
    app.add_middleware(_Connection)
    app.add_exception_handler(HTTPException, _refused)
    app.state.queue, app.state.stopping = queue, stopping
    return app


class _Server(uvicorn.Server):
    """uvicorn's server; after a signal, requests end by themselves before uvicorn cancels them."""

    interrupted = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.interrupted |= sig == signal.SIGINT
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(PATIENCE, self.config.app.state.stopping.set)
        await super().shutdown(sockets)


def run(app: FastAPI, where: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; running requests have :data:`PATIENCE` seconds then."""
    config = deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["loggers"][__package__] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    server = _Server(uvicorn.Config(app, log_config=config, timeout_graceful_shutdown=5 * PATIENCE))
    try:
        server.run(sockets=[where])
        if server.interrupted:  # uvicorn raises the signal again as its loop ends, which a task may then swallow
            raise KeyboardInterrupt
    finally:
        app.state.stopping.set()
        app.state.queue.wait(PATIENCE)
