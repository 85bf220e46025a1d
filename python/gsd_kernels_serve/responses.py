"""``/v1/responses``: one text, told as items."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from transformers.cli.serving.response import ResponseHandler, compute_usage
from transformers.cli.serving.utils import ReasoningText, ToolCall

from . import fields
from .calls import Request
from .logprobs import Entry
from .messages import items_of, messages_of
from .service import Waiting
from .texts import Chats

_ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "text", "tool_choice", "tools", "top_p")
"""Fields of a request that a response has as well."""


class Items:
    """The items of a response, each begun, continued and ended once and in its place.

    Args:
        name: of the request.

    Attributes:
        output: the items that have ended.
        open: the one that goes on, or ``None``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.output: list[dict[str, Any]] = []
        self.open: dict[str, Any] | None = None
        self.text = ""
        self.logprobs: list[dict[str, Any]] = []

    def part(self, value: Any, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The events of the next part of a text, a string, ``ReasoningText`` or ``ToolCall``."""
        if isinstance(value, ToolCall):
            yield from self._call(value)
            return
        kind = "reasoning" if isinstance(value, ReasoningText) else "message"
        if self.open is None or self.open["type"] != kind:
            yield from self._end()
            yield from self._begin(kind)
        self.text += value
        self.logprobs += logprobs if kind == "message" else []
        yield self._within(f"{self._kind()}.delta", delta=value, logprobs=logprobs)

    def end(self) -> Iterator[dict[str, Any]]:
        """The last events; a text without anything is a message."""
        if self.open is None and not self.output:
            yield from self._begin("message")
        yield from self._end()

    def _begin(self, kind: str) -> Iterator[dict[str, Any]]:
        same = sum(item["type"] == kind for item in self.output)
        name = f"{'msg' if kind == 'message' else 'rs'}_{self.name}" + (f"_{same}" if same else "")
        own = {"role": "assistant"} if kind == "message" else {"summary": []}
        self.open = {"id": name, "type": kind, "status": "in_progress", "content": [], **own}
        self.text, self.logprobs = "", []
        yield self._item("added", self.open)
        if kind == "message":
            yield self._within("content_part.added", part=self._content())

    def _end(self) -> Iterator[dict[str, Any]]:
        if self.open is None:
            return
        yield self._within(f"{self._kind()}.done", text=self.text, logprobs=self.logprobs)
        if self.open["type"] == "message":
            yield self._within("content_part.done", part=self._content())
        item = {**self.open, "status": "completed", "content": [self._content()]}
        yield self._item("done", item)
        self.output.append(item)
        self.open = None

    def _call(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        yield from self._end()
        name = f"{self.name}_tool_call_{sum(item['type'] == 'function_call' for item in self.output)}"
        said = {"name": call.name, "arguments": call.arguments}
        item = {"id": name, "call_id": name, "type": "function_call", "status": "completed", **said}
        yield self._item("added", item)
        index = len(self.output)
        yield {"type": "response.function_call_arguments.done", "item_id": name, "output_index": index, **said}
        yield self._item("done", item)
        self.output.append(item)

    def _kind(self) -> str:
        assert self.open is not None
        return "output_text" if self.open["type"] == "message" else "reasoning_text"

    def _content(self) -> dict[str, Any]:
        kind = self._kind()
        own = {"annotations": []} if kind == "output_text" else {}
        return {"type": kind, "text": self.text, **own, **({"logprobs": self.logprobs} if self.logprobs else {})}

    def _item(self, what: str, item: dict[str, Any]) -> dict[str, Any]:
        return {"type": f"response.output_item.{what}", "output_index": len(self.output), "item": item}

    def _within(self, what: str, **said: Any) -> dict[str, Any]:
        """An event of what the open item says; only that of a message has log-probabilities."""
        assert self.open is not None
        if self.open["type"] != "message":
            said.pop("logprobs", None)
        place = {"item_id": self.open["id"], "output_index": len(self.output), "content_index": 0}
        return {"type": f"response.{what}", **place, **said}


class Responses(Chats):
    """``/v1/responses``."""

    endpoint, done = fields.RESPONSES, ""
    log_probs = "include", 'include: ["message.output_text.logprobs"]'

    def read(self, body: dict[str, Any]) -> Request:
        items = items_of(body["input"])
        if body.get("instructions"):  # which transformers would put in place of the first system message
            items = [{"role": "system", "content": body["instructions"]}, *items]
        messages = ResponseHandler._normalize_input({"input": items})
        form = body.get("text", {}).get("format")
        return self.chat(body, messages_of(messages, "input"), form, "text.format")

    def whole(self, request: Request) -> dict[str, Any]:
        items = Items(request.id)
        for piece in request.calls[0].pieces:
            list(items.part(piece.value, self._log_probs(request, piece.entries)))
        list(items.end())
        return self._over(request, items.output)

    async def events(self, request: Request, first: Waiting) -> AsyncIterator[dict[str, Any]]:
        for kind, status in (("created", "queued"), ("in_progress", "in_progress")):
            yield {"type": f"response.{kind}", "response": self._response(request, status, [])}
        items = Items(request.id)
        async for piece in self.service.pieces_of(first):
            if piece.value or items.open is not None or not items.output:  # else tokens that show nothing
                for event in items.part(piece.value, self._log_probs(request, piece.entries)):
                    yield event
        for event in items.end():
            yield event
        response = self._over(request, items.output)
        yield {"type": f"response.{response['status']}", "response": response}

    def numbered(self, event: dict[str, Any], number: int) -> dict[str, Any]:
        return {**event, "sequence_number": number}

    def failed(self, request: Request, error: dict[str, Any]) -> list[dict[str, Any]]:
        told = {"code": "server_error", "message": error["message"]}
        response = {**self._response(request, "failed", []), "error": told}
        return [{**error, "type": "error"}, {"type": "response.failed", "response": response}]

    def _response(self, request: Request, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": f"resp_{request.id}", "created_at": request.since, "model": self.service.name}
        unsaid = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False}
        echo = {name: request.body[name] for name in _ECHOED if name in request.body}
        return {**head, "object": "response", "status": status, "output": output, **unsaid, **echo}

    def _over(self, request: Request, output: list[dict[str, Any]]) -> dict[str, Any]:
        """The response of a text that is over: with statistics, and whether it was cut."""
        (call,) = request.calls
        response = self._response(request, "completed", output)
        response["usage"] = compute_usage(len(call.prompt.ids), len(call.ids)).model_dump(exclude_none=True)
        if call.finish == "length":
            response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            output[-1]["status"] = "incomplete"
        return {**response, **request.statistics()}

    def _log_probs(self, request: Request, entries: Iterable[Entry]) -> list[dict[str, Any]]:
        return [] if request.top is None else self.service.pieces.chat(entries)["content"]
