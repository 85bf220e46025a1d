"""Requests of one text or many, each decoded by itself: ``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator
from functools import reduce
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import Response
from transformers.cli.serving.utils import ReasoningText, ToolCall

from . import fields
from .answers import Answer, last_of
from .calls import Call, Piece, Prompt, Request
from .checks import Object, Refused, one_of, reader, text, wrong
from .generation import config_of, names_length, token_ids
from .logprobs import Entry, Place
from .messages import Content, messages_of, template_arguments
from .service import Events, Service, Waiting, answer_of
from .tools import chosen, held_to

log = logging.getLogger(__name__)

_WHOLE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class Texts:
    """An endpoint: a request is read, its texts are decoded one after another and told, as a whole or as events.

    Args:
        service: the model and its queue.

    Attributes:
        endpoint: its path.
        done: what ends a stream.
    """

    endpoint: str
    done = "data: [DONE]\n\n"

    def __init__(self, service: Service) -> None:
        self.service = service

    def read(self, body: dict[str, Any]) -> Request:
        """A checked request.

        Raises:
            Refused: something that only shows with the model and its tokenizer.
        """
        raise NotImplementedError

    def whole(self, request: Request) -> dict[str, Any]:
        """The answer of a request that is no stream."""
        raise NotImplementedError

    def events(self, request: Request, first: Waiting) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream; ``first``: its first text, which is being decoded already."""
        raise NotImplementedError

    def answer(self, request: Request) -> Answer | None:
        """Return the reader of a text that has parts; ``None``: it is text alone."""
        return None

    def numbered(self, event: dict[str, Any], number: int) -> dict[str, Any]:
        """An event with its place in a stream, where it has one."""
        return event

    def failed(self, request: Request, error: dict[str, Any]) -> list[dict[str, Any]]:
        """The last events of a stream that an error ends."""
        return [{"error": error, "detail": error["message"]}]

    async def handle_request(self, http: HttpRequest, body: dict[str, Any]) -> Response:
        """Answer a request."""
        service = self.service
        request = await service.prepare(fields.NEEDED[self.endpoint], self._checked, body, http.state.request_id)
        await service.hold(request)
        async with service.connected(request.gone, http):
            if request.stream:
                first = await self.begin(request.calls[0])
                return Events(self._stream(request, first), request.gone)
            for call in request.calls:
                waiting = await self.begin(call)
                call.pieces = [piece async for piece in service.pieces_of(waiting)]
            spelled = await asyncio.to_thread(self._spelled, request)
            return Response(spelled, media_type="application/json")

    def _spelled(self, request: Request) -> str:
        """The answer as JSON, made and spelled in parts: other threads have turns between them."""
        return "".join(_WHOLE.iterencode(self.whole(request)))

    def _checked(self, body: dict[str, Any], request_id: str) -> Request:
        request = self.read(self.service.checked(self.endpoint, body))
        request.id = request_id
        return request

    def request(self, body: dict[str, Any], prompts: list[Prompt], **asked: Any) -> Request:
        """A request of some prompts; ``asked``: what is read of it beside its body."""
        config, named = config_of(body, self.service.model)
        needed, length = fields.NEEDED[self.endpoint], names_length(body, named)
        for prompt in prompts:
            prompt.config = self.service.fitted(config, len(prompt.ids), needed, length=length)
        return Request(body, prompts, named, **asked)

    async def begin(self, call: Call) -> Waiting:
        """Have a text decoded, to its first token."""
        return await self.service.begin(call, await asyncio.to_thread(self.answer, call.request))

    async def _stream(self, request: Request, first: Waiting) -> AsyncIterator[str]:
        number = itertools.count()
        try:
            async for event in self.events(request, first):
                yield _event(self.numbered(event, next(number)))
            yield self.done
        except Exception as error:
            status, told = answer_of(error, self.endpoint)
            if status == 500:
                log.exception("%s failed", self.endpoint)
            for event in self.failed(request, told["error"]):
                yield _event(self.numbered(event, next(number)))


class Choices(Texts):
    """An endpoint whose answers and events are lists of choices, a choice a text."""

    object: str
    part: str

    def first(self, call: Call) -> dict[str, Any] | None:
        """The first event of a text, before it has a token."""
        raise NotImplementedError

    def delta(self, request: Request, call: Call, piece: Piece) -> dict[str, Any]:
        """A part of a text behind those before."""
        raise NotImplementedError

    def last(self, request: Request, call: Call) -> dict[str, Any]:
        """The last event of a text: why it ends."""
        finish = "tool_calls" if call.made and call.finish == "stop" else call.finish
        return {**self.delta(request, call, Piece("", [])), "finish_reason": finish}

    def choice(self, request: Request, call: Call) -> dict[str, Any]:
        """A text that is over: all that its events would tell."""
        told = [self.first(call), *(self.delta(request, call, piece) for piece in call.pieces)]
        return reduce(_join, [*told, self.last(request, call)], {})

    def whole(self, request: Request) -> dict[str, Any]:
        choices = [{"index": index, **self.choice(request, call)} for index, call in enumerate(request.calls)]
        about = {**request.counted(), **request.statistics()}
        return {**self._head(request, self.object), "choices": choices, **about}

    async def events(self, request: Request, first: Waiting) -> AsyncIterator[dict[str, Any]]:
        head, usage = self._head(request, self.part), request.body.get("stream_options", {}).get("include_usage")
        for index, call in enumerate(request.calls):

            def event(choice: dict[str, Any], index: int = index, **rest: Any) -> dict[str, Any]:
                return {**head, "choices": [{"index": index, **choice}], **rest}

            waiting = await self.begin(call) if index else first
            if (begun := await asyncio.to_thread(self.first, call)) is not None:
                yield event({**begun, "finish_reason": None})
            async for piece in self.service.pieces_of(waiting):
                yield event({**self.delta(request, call, piece), "finish_reason": None})
            rest = request.statistics() if call is request.calls[-1] else {}
            if rest and usage is None:
                rest |= request.counted()
            yield event(self.last(request, call), **rest)
        if usage:
            yield {**head, "choices": [], **request.counted(), **request.statistics()}

    def _head(self, request: Request, kind: str) -> dict[str, Any]:
        return {"id": request.id, "created": request.since, "model": self.service.name, "object": kind}


class Completions(Choices):
    """``/v1/completions``."""

    endpoint, object, part = fields.COMPLETIONS, "text_completion", "text_completion"

    def read(self, body: dict[str, Any]) -> Request:
        copies, echo = body.get("n", 1), bool(body.get("echo"))
        if body.get("best_of", copies) != copies:
            raise Refused("best_of", f"expected as many as n, {copies}, got {body['best_of']}")
        request = self.request(body, self._prompts(body["prompt"], echo), top=body.get("logprobs"))
        if request.prompts[0].config.max_new_tokens == 0 and not echo:
            raise wrong("max_tokens", "an integer from 1 to 2147483647, 0 beside echo", 0)
        return request

    def _prompts(self, given: Any, echo: bool) -> list[Prompt]:
        """A string, a list of strings, of token ids, or of lists of them; to be shown, if ``echo``."""
        service = self.service
        if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
            given = [given]
        if not isinstance(given, list) or not given:
            raise wrong("prompt", "a string, token ids, or a list of either", given)
        if len(given) > fields.MAX_TEXTS:
            raise Refused("prompt", f"{len(given)} texts of a request; {fields.MAX_TEXTS} at most")
        prompts = []
        for number, one in enumerate(given):
            name = "prompt" if len(given) == 1 else f"prompt[{number}]"
            if isinstance(one, list):
                ids = token_ids(one, name, service.vocabulary)
            else:
                text(name, one)
                ids = service.tokens(one, name)
            if not ids:
                raise Refused(name, "has no tokens")
            shown = (one if isinstance(one, str) else service.tokenizer.decode(ids)) if echo else ""
            prompts.append(Prompt(ids, shown, last_of(service.tokenizer, ids)))
        return prompts

    def first(self, call: Call) -> dict[str, Any] | None:
        return {"text": call.prompt.shown, "logprobs": self._echoed(call)} if call.prompt.shown else None

    def delta(self, request: Request, call: Call, piece: Piece) -> dict[str, Any]:
        told = request.top is not None and piece.entries
        logprobs = self.service.pieces.completion(piece.entries, call.place) if told else None
        return {"text": str(piece.value), "logprobs": logprobs}

    def _echoed(self, call: Call) -> dict[str, Any] | None:
        prompt = call.prompt
        if call.echoed and prompt.told is None:
            prompt.told = self.service.pieces.completion(call.echoed, Place(shown=prompt.shown))
        return prompt.told


class Chats(Texts):
    """An endpoint of messages, whose texts may think and call.

    Attributes:
        log_probs: the field that asks for log-probabilities, and how.
    """

    log_probs: tuple[str, str]

    def chat(self, body: dict[str, Any], messages: list[dict[str, Any]], form: Any, field: str) -> Request:
        """A request of messages; ``form``: what its ``field`` holds the texts to, or ``None``."""
        service, needed = self.service, fields.NEEDED[self.endpoint]
        offered = chosen(body, service.tokenizer)
        name, needed_too = self.log_probs
        if body.get("top_logprobs") and not body.get(name):
            raise Refused("top_logprobs", f"needs {needed_too}")
        held = held_to(offered, form, field, service.answers.written)
        ids = service.templated(messages, offered.tools, template_arguments(body, service.tokenizer), needed)
        top = body.get("top_logprobs", 0) if body.get(name) else None
        asked = {"top": top, "tools": offered.tools, "forced": offered.forced, "held": held}
        return self.request(body, [Prompt(ids)], **asked)

    def answer(self, request: Request) -> Answer | None:
        return None if request.is_content else self.service.answers.begin(request.prompts[0].ids, request.tools)


class Prediction(Object):
    """A text that the answer may repeat."""

    content: Content
    type: one_of("content")


_prediction = reader(Prediction)


class Chat(Chats, Choices):
    """``/v1/chat/completions``."""

    endpoint, object, part = fields.CHAT, "chat.completion", "chat.completion.chunk"
    log_probs = "logprobs", "logprobs: true"

    def read(self, body: dict[str, Any]) -> Request:
        messages = messages_of(body["messages"])
        request = self.chat(body, messages, body.get("response_format"), "response_format")
        request.reference = self._reference(body.get("prediction"))
        return request

    def _reference(self, given: Any) -> list[int] | None:
        """The tokens of ``prediction``."""
        if given is None:
            return None
        parts = _prediction("prediction", given)["content"]
        return self.service.tokens("".join(part["text"] for part in parts), "prediction", add_special_tokens=False)

    def choice(self, request: Request, call: Call) -> dict[str, Any]:
        choice = super().choice(request, call)
        message = choice.pop("delta")
        for made in message.get("tool_calls", ()):
            del made["index"]
        if call.made and request.forced is not None:
            message["content"] = None
        return {"message": {**message, "refusal": None}, **choice}

    def first(self, call: Call) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def delta(self, request: Request, call: Call, piece: Piece) -> dict[str, Any]:
        value, written = piece.value, piece.entries
        if isinstance(value, ToolCall):
            made = _call(f"{request.id}-{call.number}-{call.made}", value)
            delta: dict[str, Any] = {"tool_calls": [{"index": call.made, **made}]}
            call.made += 1
        elif isinstance(value, ReasoningText):
            delta = {"reasoning_content": value}
        else:
            delta = {"content": value} if value or written else {}
        return {"delta": delta, "logprobs": self._logprobs(written, request) if written else None}

    def _logprobs(self, written: list[Entry], request: Request) -> dict[str, Any] | None:
        return self.service.pieces.chat(written) if request.top is not None else None


def _call(name: str, call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{name}", "type": "function", "function": function}


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, allow_nan=False, separators=(',', ':'))}\n\n"


def _join(told: dict[str, Any], part: dict[str, Any] | None) -> dict[str, Any]:
    """Put an event behind those before: texts and lists go on, and nothing takes the place of something."""
    joined = dict(told)
    for name, value in (part or {}).items():
        had = told.get(name)
        if isinstance(value, dict):
            joined[name] = _join(had or {}, value)
        elif had and isinstance(value, (str, list)):
            joined[name] = had + value
        elif value is not None or name not in told:
            joined[name] = value
    return joined
