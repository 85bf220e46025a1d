"""The endpoints: ``/v1/chat/completions`` and ``/v1/completions`` tell texts as choices, ``/v1/responses`` as items."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import weakref
from collections.abc import AsyncIterator, Iterator
from copy import deepcopy
from functools import partial, reduce
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import Response, StreamingResponse
from transformers.cli.serving.response import ResponseHandler, compute_usage
from transformers.cli.serving.utils import ReasoningText, ToolCall

from gsd_kernels_cli.pair import BAD_CHAT

from . import fields
from .answers import Answer
from .calls import Call, Piece, Prompt, Request, Writer
from .checks import Json, Object, Refused, one_line, one_of, reader, text, wrong
from .generation import LENGTHS, config_of
from .logprobs import Entry, Place
from .messages import Content, check_shown, chosen, held_to, items_of, messages_of, template_arguments
from .service import NoModelError, Service, Waiting, answer_of, connected, in_loop, pieces_of

log = logging.getLogger(__name__)

LAST_TOKENS = 8
"""Tokens of a prompt before which there is nothing that a text behind them would be decoded by."""

DEFAULT_TOKENS = 1024
"""Tokens of a text whose request does not say how many."""

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

    def read(self, body: Json) -> Request:
        """A checked request.

        Raises:
            Refused: something that only shows with the model and its tokenizer.
        """
        raise NotImplementedError

    def whole(self, request: Request) -> Json:
        """The answer of a request that is no stream."""
        raise NotImplementedError

    def events(self, request: Request, first: Waiting) -> AsyncIterator[Json]:
        """The events of a stream; ``first``: its first text, which is being decoded already."""
        raise NotImplementedError

    def answer(self, request: Request) -> Answer | None:
        """Return the reader of a text that has parts; ``None``: it is text alone."""
        return None

    def numbered(self, event: Json, number: int) -> Json:
        """An event with its place in a stream, where it has one."""
        return event

    def failed(self, request: Request, error: Json) -> list[Json]:
        """The last events of a stream that an error ends."""
        return [{"error": error, "detail": error["message"]}]

    async def handle_request(self, http: HttpRequest, body: Json) -> Response:
        """Answer a request."""
        service = self.service
        request = await service.prepare(fields.NEEDED[self.endpoint], self._checked, body, http.state)
        if request.held is not None:
            schema, field = request.held
            request.grammar = await service.compile(field, service.grammars.of, schema, field, request.ends)
        async with connected(request.gone, http):
            if request.stream:
                events = self._stream(request, await self.begin(request.calls[0]))
                return StreamingResponse(events, media_type="text/event-stream")
            for call in request.calls:
                call.pieces = [piece async for piece in pieces_of(await self.begin(call))]
            # Made and spelled in parts: other threads have turns between them.
            spelled = await asyncio.to_thread(lambda: "".join(_WHOLE.iterencode(self.whole(request))))
            return Response(spelled, media_type="application/json")

    def _checked(self, body: Json, state: Any) -> Request:
        kept = fields.check(self.endpoint, body)
        if (name := kept.get("model")) not in (None, self.service.name):
            raise NoModelError("model", f"Server is pinned to '{self.service.name}'; requested '{name}'.")
        request = self.read(kept)
        request.id, request.gone = state.request_id, state.gone
        return request

    def request(self, body: Json, prompts: list[Prompt], **asked: Any) -> Request:
        """A request of some prompts; ``asked``: what is read of it beside its body.

        Raises:
            Refused: fields contradict each other; a prompt leaves no room where no length is named, or is too long.
        """
        service, needed = self.service, fields.NEEDED[self.endpoint]
        config, named = config_of(body, service.model)
        length = any(name in body for name in LENGTHS) or named.keys() & {"max_new_tokens", "max_length"}
        for prompt in prompts:
            prompt.config, tokens = deepcopy(config), len(prompt.ids)
            if not length:  # a text ends where the positions do; a length that is named goes beyond them
                most = max(config.max_new_tokens or 0, DEFAULT_TOKENS)
                if service.positions is not None:
                    if tokens >= service.positions:
                        reason = f"{tokens} tokens leave no room in the model's {service.positions} positions"
                        raise Refused(needed, f"{reason}; shorten it, or name a length to go beyond them")
                    most = min(most, service.positions - tokens)
                prompt.config.max_new_tokens = most
            if tokens > service.most:
                raise Refused(needed, f"{tokens} tokens; this server reads {service.most} (--max-prompt): shorten it")
        return Request(body, prompts, named, **asked)

    async def begin(self, call: Call) -> Waiting:
        """Have a text decoded, and wait for its beginning; :func:`pieces_of` gives the rest.

        Raises:
            TypeError, ValueError: the request cannot be served.
            ClientGoneError, StoppingError: nobody waits for the text.
        """
        service, waiting = self.service, asyncio.Queue()
        send = partial(in_loop, asyncio.get_running_loop(), waiting.put_nowait)
        answer = await asyncio.to_thread(self.answer, call.request)
        writer = Writer(call, service.tokenizer, service.stopping, answer, send)
        waits = weakref.ref(writer)  # until its turn a text whose client goes holds nothing

        def run() -> None:
            try:
                if (writer := waits()) is not None:
                    service.queue.decode(writer)
                    send(None)
            except Exception as error:
                send(error)

        service.queue.submit(run)
        async for _ in pieces_of(waiting):
            pass
        return waiting

    async def _stream(self, request: Request, first: Waiting) -> AsyncIterator[str]:
        number = itertools.count()

        def line(event: Json) -> str:
            data = json.dumps(self.numbered(event, next(number)), allow_nan=False, separators=(",", ":"))
            return f"data: {data}\n\n"

        try:
            async for event in self.events(request, first):
                yield line(event)
            yield self.done
        except Exception as error:
            status, told = answer_of(error, self.endpoint)
            if status == 500:
                log.exception("%s failed", self.endpoint)
            for event in self.failed(request, told["error"]):
                yield line(event)


class Choices(Texts):
    """An endpoint whose answers and events are lists of choices, a choice a text."""

    object: str
    part: str

    def first(self, call: Call) -> Json | None:
        """The first event of a text, before it has a token."""
        raise NotImplementedError

    def delta(self, call: Call, piece: Piece) -> Json:
        """A part of a text behind those before."""
        raise NotImplementedError

    def last(self, call: Call) -> Json:
        """The last event of a text: why it ends."""
        finish = "tool_calls" if call.made and call.finish == "stop" else call.finish
        return {**self.delta(call, Piece("", [])), "finish_reason": finish}

    def choice(self, call: Call) -> Json:
        """A text that is over: all that its events would tell."""
        told = [self.first(call), *(self.delta(call, piece) for piece in call.pieces)]
        return reduce(_join, [*told, self.last(call)], {})

    def whole(self, request: Request) -> Json:
        choices = [{"index": index, **self.choice(call)} for index, call in enumerate(request.calls)]
        return {**self._head(request, self.object), "choices": choices, **request.counted(), **request.statistics()}

    async def events(self, request: Request, first: Waiting) -> AsyncIterator[Json]:
        head, usage = self._head(request, self.part), request.body.get("stream_options", {}).get("include_usage")
        for index, call in enumerate(request.calls):

            def event(choice: Json, index: int = index, **rest: Any) -> Json:
                return {**head, "choices": [{"index": index, **choice}], **rest}

            waiting = await self.begin(call) if index else first
            if (begun := await asyncio.to_thread(self.first, call)) is not None:
                yield event({**begun, "finish_reason": None})
            async for piece in pieces_of(waiting):
                yield event({**self.delta(call, piece), "finish_reason": None})
            rest = request.statistics() if call is request.calls[-1] else {}
            if rest and usage is None:
                rest |= request.counted()
            yield event(self.last(call), **rest)
        if usage:
            yield {**head, "choices": [], **request.counted(), **request.statistics()}

    def _head(self, request: Request, kind: str) -> Json:
        return {"id": request.id, "created": request.since, "model": self.service.name, "object": kind}


class Completions(Choices):
    """``/v1/completions``."""

    endpoint, object, part = fields.COMPLETIONS, "text_completion", "text_completion"

    def read(self, body: Json) -> Request:
        copies, echo = body.get("n", 1), bool(body.get("echo"))
        if body.get("best_of", copies) != copies:
            raise Refused("best_of", f"expected as many as n, {copies}, got {body['best_of']}")
        service, given, prompts = self.service, body["prompt"], []
        if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
            given = [given]
        if not isinstance(given, list) or not given:
            raise wrong("prompt", "a string, token ids, or a list of either", given)
        if len(given) > fields.MAX_TEXTS:
            raise Refused("prompt", f"{len(given)} texts of a request; {fields.MAX_TEXTS} at most")
        for number, one in enumerate(given):
            name = "prompt" if len(given) == 1 else f"prompt[{number}]"
            if isinstance(one, list):
                if odd := [token for token in one if type(token) is not int or not 0 <= token < service.vocabulary]:
                    raise Refused(name, f"expected token ids from 0 to {service.vocabulary - 1}, got {odd[0]!r}")
                ids = one
            else:
                ids = service.tokens(text(name, one), name)
            if not ids:
                raise Refused(name, "has no tokens")
            shown = (one if isinstance(one, str) else service.tokenizer.decode(ids)) if echo else ""
            last = ids[-LAST_TOKENS:]
            split = service.tokenizer.decode(last, skip_special_tokens=True).endswith("\ufffd")  # within a character
            prompts.append(Prompt(ids, shown, [] if split else last))
        request = self.request(body, prompts, top=body.get("logprobs"))
        if request.prompts[0].config.max_new_tokens == 0 and not echo:
            raise wrong("max_tokens", "an integer from 1 to 2147483647, 0 beside echo", 0)
        return request

    def first(self, call: Call) -> Json | None:
        prompt = call.prompt
        if call.echoed and prompt.told is None:
            prompt.told = self.service.pieces.completion(call.echoed, Place(shown=prompt.shown))
        return {"text": prompt.shown, "logprobs": prompt.told} if prompt.shown else None

    def delta(self, call: Call, piece: Piece) -> Json:
        told = call.request.top is not None and piece.entries
        logprobs = self.service.pieces.completion(piece.entries, call.place) if told else None
        return {"text": str(piece.value), "logprobs": logprobs}


class Chats(Texts):
    """An endpoint of messages, whose texts may think and call.

    Attributes:
        log_probs: the field that asks for log-probabilities, and how.
    """

    log_probs: tuple[str, str]

    def chat(self, body: Json, messages: list[Json], form: Any, field: str) -> Request:
        """A request of messages; ``form``: what its ``field`` holds the texts to, or ``None``.

        Raises:
            Refused: the template does not take it, or leaves something out; a field is wrong.
        """
        service, needed = self.service, fields.NEEDED[self.endpoint]
        offered = chosen(body, service.tokenizer)
        name, needed_too = self.log_probs
        if body.get("top_logprobs") and not body.get(name):
            raise Refused("top_logprobs", f"needs {needed_too}")
        held = held_to(offered, form, field, service.answers.written)
        arguments = template_arguments(body, service.tokenizer)
        check_shown(service.tokenizer, messages, needed)
        try:
            written = service.tokenizer.apply_chat_template(
                messages, tools=offered.tools or None, add_generation_prompt=True, tokenize=False, **arguments
            )
        except BAD_CHAT as error:
            raise Refused(needed, f"the chat template: {one_line(error)}") from error
        ids = service.tokens(written, needed, add_special_tokens=False)
        top = body.get("top_logprobs", 0) if body.get(name) else None
        return self.request(body, [Prompt(ids)], top=top, offered=offered, held=held)

    def answer(self, request: Request) -> Answer | None:
        if request.is_content:
            return None
        return self.service.answers.begin(request.prompts[0].ids, request.offered.tools)

    def log_probs_of(self, call: Call, written: list[Entry]) -> Json | None:
        """Log-probabilities of tokens that a part was made of; ``None``: none, or not asked for."""
        return self.service.pieces.chat(written) if written and call.request.top is not None else None


class Prediction(Object):
    """A text that the answer may repeat."""

    content: Content
    type: one_of("content")


_prediction = reader(Prediction)


class Chat(Chats, Choices):
    """``/v1/chat/completions``."""

    endpoint, object, part = fields.CHAT, "chat.completion", "chat.completion.chunk"
    log_probs = "logprobs", "logprobs: true"

    def read(self, body: Json) -> Request:
        request = self.chat(body, messages_of(body["messages"]), body.get("response_format"), "response_format")
        if "prediction" in body:
            written = "".join(part["text"] for part in _prediction("prediction", body["prediction"])["content"])
            request.reference = self.service.tokens(written, "prediction", add_special_tokens=False)
        return request

    def choice(self, call: Call) -> Json:
        choice = super().choice(call)
        message = choice.pop("delta")
        for made in message.get("tool_calls", ()):
            del made["index"]
        if call.made and call.request.offered.forced is not None:
            message["content"] = None
        return {"message": {**message, "refusal": None}, **choice}

    def first(self, call: Call) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def delta(self, call: Call, piece: Piece) -> Json:
        value, written = piece.value, piece.entries
        if isinstance(value, ToolCall):
            name = f"call_{call.request.id}-{call.number}-{call.made}"
            function = {"name": value.name, "arguments": value.arguments}
            delta: Json = {"tool_calls": [{"index": call.made, "id": name, "type": "function", "function": function}]}
            call.made += 1
        elif isinstance(value, ReasoningText):
            delta = {"reasoning_content": value}
        else:
            delta = {"content": value} if value or written else {}
        return {"delta": delta, "logprobs": self.log_probs_of(call, written)}


_ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "text", "tool_choice", "tools", "top_p")
"""Fields of a request that a response has as well."""

_BEGUN: dict[str, tuple[str, Json, Json]] = {
    "message": ("msg", {"role": "assistant"}, {"type": "output_text", "text": "", "annotations": []}),
    "reasoning": ("rs", {"summary": []}, {"type": "reasoning_text", "text": ""}),
}
"""By type of an item: how its name begins, what it has beside its content, and its content before there is a text."""


class Items:
    """The items of a response, each begun, continued and ended once and in its place.

    An event shows an item and its content as they are when it is made.

    Args:
        name: of the request.

    Attributes:
        output: the items that have ended.
        open: the one that goes on, or ``None``.
        content: of that one.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.output: list[Json] = []
        self.open: Json | None = None
        self.content: Json = {}

    def part(self, value: Any, logprobs: list[Json]) -> Iterator[Json]:
        """The events of the next part of a text, a string, ``ReasoningText`` or ``ToolCall``."""
        if isinstance(value, ToolCall):
            yield from self._end()
            yield from self._call(value)
            return
        kind = "reasoning" if isinstance(value, ReasoningText) else "message"
        if self.open is None or self.open["type"] != kind:
            yield from self._end()
            yield from self._begin(kind)
        self.content["text"] += value
        if logprobs and kind == "message":
            self.content.setdefault("logprobs", []).extend(logprobs)
        yield self._within(f"{self.content['type']}.delta", delta=value, logprobs=logprobs)

    def end(self) -> Iterator[Json]:
        """The last events; a text without anything is a message."""
        if self.open is None and not self.output:
            yield from self._begin("message")
        yield from self._end()

    def _begin(self, kind: str) -> Iterator[Json]:
        (mark, own, content), same = _BEGUN[kind], sum(item["type"] == kind for item in self.output)
        name = f"{mark}_{self.name}" + (f"_{same}" if same else "")
        self.open = {"id": name, "type": kind, "status": "in_progress", "content": [], **own}
        self.content = dict(content)
        yield self._item("added", self.open)
        if kind == "message":
            yield self._within("content_part.added", part=self.content)

    def _end(self) -> Iterator[Json]:
        if self.open is None:
            return
        said = {"text": self.content["text"], "logprobs": self.content.get("logprobs", [])}
        yield self._within(f"{self.content['type']}.done", **said)
        if self.open["type"] == "message":
            yield self._within("content_part.done", part=self.content)
        yield from self._done({**self.open, "status": "completed", "content": [self.content]})
        self.open = None

    def _call(self, call: ToolCall) -> Iterator[Json]:
        name = f"{self.name}_tool_call_{sum(item['type'] == 'function_call' for item in self.output)}"
        said = {"name": call.name, "arguments": call.arguments}
        item = {"id": name, "call_id": name, "type": "function_call", "status": "completed", **said}
        yield self._item("added", item)
        done = "response.function_call_arguments.done"
        yield {"type": done, "item_id": name, "output_index": len(self.output), **said}
        yield from self._done(item)

    def _done(self, item: Json) -> Iterator[Json]:
        yield self._item("done", item)
        self.output.append(item)

    def _item(self, what: str, item: Json) -> Json:
        return {"type": f"response.output_item.{what}", "output_index": len(self.output), "item": item}

    def _within(self, what: str, **said: Any) -> Json:
        """An event of what the open item says; only that of a message has log-probabilities."""
        assert self.open is not None
        if self.open["type"] != "message":
            said.pop("logprobs", None)
        place = {"item_id": self.open["id"], "output_index": len(self.output), "content_index": 0}
        return {"type": f"response.{what}", **place, **said}


class Responses(Chats):
    """``/v1/responses``: one text, told as items."""

    endpoint, done = fields.RESPONSES, ""
    log_probs = "include", 'include: ["message.output_text.logprobs"]'

    def read(self, body: Json) -> Request:
        items = items_of(body["input"])
        if body.get("instructions"):  # which transformers would put in place of the first system message
            items = [{"role": "system", "content": body["instructions"]}, *items]
        messages = ResponseHandler._normalize_input({"input": items})
        return self.chat(body, messages_of(messages, "input"), body.get("text", {}).get("format"), "text.format")

    def whole(self, request: Request) -> Json:
        (call,), items = request.calls, Items(request.id)
        for piece in call.pieces:
            list(self._part(items, call, piece))
        list(items.end())
        return self._over(request, items.output)

    async def events(self, request: Request, first: Waiting) -> AsyncIterator[Json]:
        for kind, status in (("created", "queued"), ("in_progress", "in_progress")):
            yield {"type": f"response.{kind}", "response": self._response(request, status, [])}
        items = Items(request.id)
        async for piece in pieces_of(first):
            if piece.value or items.open is not None or not items.output:  # else tokens that show nothing
                for event in self._part(items, request.calls[0], piece):
                    yield event
        for event in items.end():
            yield event
        response = self._over(request, items.output)
        yield {"type": f"response.{response['status']}", "response": response}

    def numbered(self, event: Json, number: int) -> Json:
        return {**event, "sequence_number": number}

    def failed(self, request: Request, error: Json) -> list[Json]:
        told = {"code": "server_error", "message": error["message"]}
        response = {**self._response(request, "failed", []), "error": told}
        return [{**error, "type": "error"}, {"type": "response.failed", "response": response}]

    def _part(self, items: Items, call: Call, piece: Piece) -> Iterator[Json]:
        told = self.log_probs_of(call, piece.entries)
        return items.part(piece.value, told["content"] if told else [])

    def _response(self, request: Request, status: str, output: list[Json]) -> Json:
        return {
            "id": f"resp_{request.id}",
            "created_at": request.since,
            "model": self.service.name,
            "object": "response",
            "status": status,
            "output": output,
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            **{name: request.body[name] for name in _ECHOED if name in request.body},
        }

    def _over(self, request: Request, output: list[Json]) -> Json:
        """The response of a text that is over: with statistics, and whether it was cut."""
        (call,) = request.calls
        response = self._response(request, "completed", output)
        response["usage"] = compute_usage(len(call.prompt.ids), len(call.ids)).model_dump(exclude_none=True)
        if call.finish == "length":
            response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            output[-1]["status"] = "incomplete"
        return {**response, **request.statistics()}


def _join(told: Json, part: Json | None) -> Json:
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
