"""``/v1/responses``: transformers' own handler, for what the table of fields lets through."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterable
from itertools import chain
from typing import Any

import torch
from fastapi.responses import Response, StreamingResponse
from transformers import BatchEncoding, GenerationConfig
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler

from . import fields
from .answers import Answer, Answers
from .calls import Call
from .checks import Refused
from .items import Items
from .logprobs import Entry
from .messages import PARTS, check_input, messages_of, template_arguments
from .service import Events, OneQueue, Service, answer_of, call_of
from .spelling import answer, spelled
from .text_options import TextOptions
from .tools import Offered, chosen, forced_calls, held_to

log = logging.getLogger(__name__)

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
        call, inner, kept = await self.service.prepare("input", self._read, body)
        await self.service.hold(call.options)
        call_of.set(call)
        echo = {"model": self.service.name, **{name: kept[name] for name in _ECHOED if name in kept}}
        rewriter = _Rewriter(self.service, call, echo)
        if inner["stream"]:
            response = await super().handle_request(inner, request_id)
            assert isinstance(response, StreamingResponse)
            await self.service.first_token(call)
            return Events(_events(response.body_iterator, rewriter), call.gone)
        async with self.service.connected(call.gone):
            response = await super().handle_request(inner, request_id)
        return await answer(await asyncio.to_thread(rewriter.whole, json.loads(response.body)))

    def _read(self, given: dict[str, Any]) -> tuple[Call, dict[str, Any], dict[str, Any]]:
        """The text of a request, what transformers' handler is to know of it, and its fields, checked."""
        body, tokenizer = self.service.checked(fields.RESPONSES, given), self.service.tokenizer
        check_input(body["input"])
        offered = chosen(body, tokenizer)
        tools = offered.tools
        call = Call(self._options(body, offered), tools=tools)
        inner = {"input": _items(body["input"], body.get("instructions")), "stream": body.get("stream", False)}
        inner |= {"tools": tools} if tools else {}
        messages = messages_of(self._normalize_input(inner), "input")
        call.prompt = self.service.templated(messages, tools, template_arguments(body, tokenizer), "input")
        call.options.fitted(len(call.prompt))
        return call, inner, body

    def _options(self, body: dict[str, Any], offered: Offered) -> TextOptions:
        options = self.service.text_options(body, "input")
        options.forced = offered.forced
        if body.get("include"):
            options.top = body.get("top_logprobs", 0)
        elif body.get("top_logprobs"):
            raise Refused("top_logprobs", 'needs include: ["message.output_text.logprobs"]')
        form = body.get("text", {}).get("format")
        options.held = held_to(offered, form, "text.format", self.service.answers.written)
        return options

    def _validate_request(self, body: dict[str, Any]) -> None:
        """The table of fields has let through what is here."""

    def _build_generation_config(self, *_: Any, **__: Any) -> GenerationConfig:
        return call_of.get().options.config  # fitted to the prompt once that is known

    def _resolve_model(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
        """Find the model as transformers' own does, with a tokenizer that has written the chat already."""
        name, model, _ = super()._resolve_model(body)
        return name, model, _Written(self.service.answers, call_of.get())

    def get_processor_inputs_from_messages(self, *_: Any) -> list[dict[str, Any]]:  # type: ignore[override]
        """Nothing: the chat is written."""
        return []


class _Written:
    """A tokenizer whose template has written the tokens of a chat, and which reads the answer once.

    Args:
        answers: what does all else.
        call: the text.
    """

    def __init__(self, answers: Answers, call: Call) -> None:
        self._inner, self._call, self._read = answers, call, {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def apply_chat_template(self, *_: Any, **__: Any) -> BatchEncoding:
        """The chat, as tensors."""
        ids = torch.tensor([self._call.prompt], dtype=torch.int64, device="cpu")
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def decode(self, *_: Any) -> str:
        """Nothing of the prompt, which transformers' own parser, that is not used, may not be able to read."""
        return ""

    def answer(self) -> Answer | None:
        """The reading of the answer, or ``None``."""
        return None if self._call.options.is_content else self._inner.begin(self._call.prompt, self._call.tools)

    def read_answer(self, ids: list[int]) -> str:
        """The text of an answer, whose parts :meth:`parse_response` gives afterwards."""
        if self._call.options.is_content:
            text = self._inner.decode(ids, skip_special_tokens=True)
            self._read = {"content": text}
            return text
        text, reasoning, calls = self._inner.read(ids, self._call.prompt, self._call.tools)
        made = [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls or ()]
        self._read = {"content": text, "reasoning_content": reasoning, "tool_calls": made}
        return text

    def parse_response(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return the parts of the answer, for which transformers' handler asks."""
        return self._read


def _items(given: Any, instructions: str | None) -> Any:
    """``input`` behind the instructions; transformers' server would put them in place of the first system message."""
    if not instructions:
        return given
    if isinstance(given, str) or ("role" not in given[0] and given[0].get("type") in PARTS):
        given = [{"role": "user", "content": given}]
    return [{"role": "system", "content": instructions}, *given]


class _Rewriter:
    """transformers' response or its events, with what they lack.

    Args:
        service: the model.
        call: the text.
        echo: what the request named, and the response has as well.
    """

    def __init__(self, service: Service, call: Call, echo: dict[str, Any]) -> None:
        self.service, self.call, self.echo = service, call, echo
        self.parts = 0  # of the text, sent so far
        self.items = Items()

    def whole(self, response: dict[str, Any]) -> dict[str, Any]:
        """A response that is no stream, with its call and log-probabilities."""
        output = response["output"]
        message = next(item for item in output if item["type"] == "message")
        part = message["content"][0]
        if self.call.options.top is not None:
            part["logprobs"] = self._log_probs(chain.from_iterable(self.call.written))
        self._call_in(output, part, response["id"])
        if not part["text"] and not part.get("logprobs") and any(item["type"] == "function_call" for item in output):
            output.remove(message)
        return self._finished(response)

    def _call_in(self, output: list[dict[str, Any]], part: dict[str, Any], name: str) -> None:
        """A forced call that the message is; events have it already."""
        if self.call.options.forced is None:
            return
        for call in forced_calls(part["text"], self.call.options.forced):
            part["text"] = ""
            made = {"id": f"{name}_call", "call_id": f"{name}_call", "type": "function_call", "status": "completed"}
            output.append({**made, "name": call.name, "arguments": call.arguments})

    def _finished(self, response: dict[str, Any]) -> dict[str, Any]:
        """A response with what its request named, statistics, and whether it was cut."""
        response |= self.echo
        if response.get("status") != "completed" or self.call.statistics is None:
            return response
        response["gsd_kernels"] = self.call.statistics
        if self.call.finish == "length":
            response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            response["output"][-1]["status"] = "incomplete"
        return response

    def _log_probs(self, written: Iterable[Entry]) -> list[dict[str, Any]]:
        return self.service.pieces.chat(written)["content"]

    def event(self, event: str) -> str:
        """Return the events of a stream in place of one."""
        data = json.loads(event.removeprefix("data: "))
        if data["type"] == "response.completed":
            data["response"]["output"] = self.items.output
        if "response" in data:
            data["response"] = self._finished(data["response"])
            if data["response"]["status"] == "incomplete":
                data["type"] = "response.incomplete"
        elif data["type"] == "response.output_text.delta" and self.call.options.top is not None:
            data["logprobs"] = self._log_probs(self.call.written[self.parts])
            self.parts += 1
        return self.told(data)

    def told(self, data: dict[str, Any]) -> str:
        """Return the events of a stream in place of one that has what it is to have."""
        return "".join(f"data: {spelled(one)}\n\n" for one in self.items.events(data))


async def _events(parts: Any, rewriter: _Rewriter) -> AsyncIterator[str]:
    """transformers' events, rewritten: beside the event loop, where they may be large."""

    def rewritten(part: str) -> str:
        return "".join(rewriter.event(event) for event in part.split("\n\n") if event)

    try:
        async with contextlib.aclosing(parts):
            async for part in parts:
                large = rewriter.call.options.top is not None
                yield await asyncio.to_thread(rewritten, part) if large else rewritten(part)
    except Exception as error:
        log.exception("/v1/responses failed")
        rewriter.call.gone.set()
        yield rewriter.told({**answer_of(error, fields.RESPONSES)[1]["error"], "type": "error"})
