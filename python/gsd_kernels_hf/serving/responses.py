"""``/v1/responses``: transformers' own handler, for what the table of fields lets through."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import JSONResponse, Response, StreamingResponse
from transformers import GenerationConfig
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler

from . import fields
from .asked import Asked, asked_of
from .calls import Call
from .checks import Refused
from .messages import check_input, messages_of, template_arguments, tools_of
from .processors import schema_of
from .service import OneQueue, Service, call_of

_ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "text", "tool_choice", "tools", "top_p")
"""Fields of a request that a response has as well."""


class Responses(ResponseHandler):
    """``/v1/responses``.

    Args:
        service: the model and its queue.
        manager: transformers', of the one model.
    """

    def __init__(self, service: Service, manager: ModelManager) -> None:
        super().__init__(manager, OneQueue(service.queue))
        self.service = service

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        """Answer a request; transformers' application calls it."""
        kept = fields.check(fields.RESPONSES, body)
        self.service.check_name(kept.get("model"))
        check_input(kept["input"])
        call = Call(self._asked(kept))
        tools = self._tools(kept)
        call_of.set(call)
        inner = {name: kept[name] for name in ("input", "instructions") if name in kept}
        inner |= {"stream": kept.get("stream", False), "chat_template_kwargs": self._template(kept)}
        inner |= {"tools": tools} if tools else {}
        inner["parallel_tool_calls"] = kept.get("parallel_tool_calls", True)
        echo = {"model": self.service.name, **{name: kept[name] for name in _ECHOED if name in kept}}
        if inner["stream"]:
            response = await super().handle_request(inner, request_id)
            assert isinstance(response, StreamingResponse)
            response.body_iterator = _events(response.body_iterator, call, echo)
            return response
        async with self.service.connected(call.gone):
            response = await super().handle_request(inner, request_id)
        return JSONResponse(_told(json.loads(response.body), call, echo))

    def _asked(self, body: dict[str, Any]) -> Asked:
        asked = asked_of(body, self.service.model, "input")
        form = body.get("text", {}).get("format")
        if form is not None and (schema := schema_of(form, "text.format")) is not None:
            if body.get("tools") and body.get("tool_choice") != "none":
                raise Refused("text.format", 'tools are not served beside it; leave it out, or tool_choice "none"')
            asked.grammar = self.service.grammars.of(schema, "text.format")
        return asked

    def _tools(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        if body.get("tool_choice") == "none":
            return []
        tools = tools_of(body.get("tools", []), self.service.tokenizer)
        if tools and body.get("parallel_tool_calls") is False:
            raise Refused("parallel_tool_calls", "how many calls a text has is the model's to say; leave it out")
        return tools

    def _template(self, body: dict[str, Any]) -> dict[str, Any]:
        return template_arguments(body, self.service.tokenizer)

    def _validate_request(self, body: dict[str, Any]) -> None:
        """The table of fields has let through what is here."""

    def _build_generation_config(self, *_: Any, **__: Any) -> GenerationConfig:
        return call_of.get().asked.config  # fitted to the prompt once that is known

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict[str, Any]], *_: Any) -> list[dict[str, Any]]:
        """Messages for the template; nothing in them is left out."""
        return messages_of(messages, "input")


def _told(response: dict[str, Any], call: Call, echo: dict[str, Any]) -> dict[str, Any]:
    """A response with what its request named, statistics, and whether it was cut."""
    response |= echo
    if call.statistics is not None and response.get("status") == "completed":
        response["gsd_kernels"] = call.statistics
        if call.finish == "length":
            response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            for item in response["output"][-1:]:
                item["status"] = "incomplete"
    return response


async def _events(parts: Any, call: Call, echo: dict[str, Any]) -> AsyncIterator[str]:
    """transformers' events, their responses as :func:`_told`."""
    async with contextlib.aclosing(parts):
        try:
            async for part in parts:
                yield "".join(_event(event, call, echo) for event in part.split("\n\n") if event)
        except (GeneratorExit, asyncio.CancelledError):
            call.gone.set()
            raise


def _event(event: str, call: Call, echo: dict[str, Any]) -> str:
    found = json.loads(event.removeprefix("data: "))
    if "response" in found:
        found["response"] = _told(found["response"], call, echo)
        if found["type"] == "response.completed" and found["response"]["status"] == "incomplete":
            found["type"] = "response.incomplete"
    return f"data: {json.dumps(found)}\n\n"
