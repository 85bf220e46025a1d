"""One text on its way: what its request asks for, and what is written of it."""

from __future__ import annotations

import concurrent.futures
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import ReasoningText, ToolCall

from .answers import Answer, text_of
from .logprobs import Entry, Place, Recorder
from .text_options import TextOptions
from .tools import forced_calls


class ClientGoneError(Exception):
    """Ends the decoding of a text that nobody waits for."""


class StoppingError(RuntimeError):
    """Ends the decoding of all texts, because the server stops."""


@dataclass
class Prompt:
    """Tokens to go on from.

    Attributes:
        ids: of them.
        shown: what is put before each text.
        last: of the tokens, where a text goes on what they say.
        told: its log-probabilities, once they are formed.
    """

    ids: list[int]
    shown: str = ""
    last: list[int] = field(default_factory=list)
    told: dict[str, Any] | None = None


@dataclass
class Piece:
    """Part of a text: what the next event of a stream says, or a part of a whole answer.

    Attributes:
        value: a string; transformers' ``ReasoningText`` or ``ToolCall`` where its parser found one.
        entries: the tokens that it was made of.
    """

    value: Any
    entries: list[Entry]


@dataclass(eq=False)
class Call:
    """A text that is asked for and, once it is decoded, what became of it.

    Attributes:
        prompt: what it is behind.
        options: what its request asks for.
        name: of the text in the log.
        gone: set once the client has closed its connection.
        number: of the text in its prompt's, which is added to the seed.
        recorder: of log-probabilities, or ``None``.
        statistics: of the decoding, plain data.
        ids: its tokens.
        entries: the same with their log-probabilities.
        pieces: of an answer that is told as a whole.
        begun: done with the text's first token or with an error in its place; until then a stream can be refused.
        finish: ``"stop"``, or ``"length"`` for a text that was cut.
        since: when the request came, by ``time.perf_counter``.
        echoed: tokens of the prompt with their log-probabilities, where they are asked for.
        made: calls of functions that have been sent.
        place: of the next token in a streamed text.
    """

    prompt: Prompt
    options: TextOptions
    name: str
    gone: threading.Event
    number: int = 0
    recorder: Recorder | None = None
    statistics: dict[str, Any] | None = None
    ids: list[int] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    begun: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)
    finish: str | None = None
    since: float = field(default_factory=time.perf_counter)
    echoed: list[Entry] = field(default_factory=list)
    made: int = 0

    def __post_init__(self) -> None:
        self.place = Place(self.prompt.shown)
        if self.options.top is not None:
            self.recorder = Recorder(self.options.top)

    def fail(self, error: Exception) -> None:
        """Tell whoever waits for the first token, if it has not come, that there is none."""
        if not self.begun.done():
            self.begun.set_exception(error)

    @property
    def seed(self) -> int:
        """Of its noise; a new one where the request has none."""
        # transformers' server seeds torch when a request comes; until its turn others may have drawn.
        return secrets.randbits(63) if self.options.seed is None else (self.options.seed + self.number) % 2**64


class Writer:
    """The streamer of a decoding: keeps a text's tokens with their log-probabilities, and makes pieces of a stream's.

    Every piece of the prompt and every token is an occasion to end the decoding.

    Args:
        call: the text's.
        tokenizer: the model's.
        stopping: set when the server stops.
        answer: reads the text's parts; ``None``: it is text alone.
        send: takes every piece.
        live: whether pieces are sent as soon as they are clear; else once the text is over, joined and without the
            white space around them.
    """

    def __init__(
        self,
        call: Call,
        tokenizer: PreTrainedTokenizerBase,
        stopping: threading.Event,
        answer: Answer | None,
        send: Callable[[Piece], None],
        live: bool,
    ) -> None:
        self.call, self.tokenizer, self.stopping, self.answer, self.send = call, tokenizer, stopping, answer, send
        self.live = live and call.options.forced is None
        self.decoding = DecodeStream(call.prompt.last, skip_special_tokens=answer is None)
        self.prompt = True  # comes first
        self.waiting: list[Entry] = []
        self.kept: list[Any] | None = None if live else []
        self.sent = ""
        for value in answer.begun if answer is not None else ():
            self._piece(value)

    def ask(self) -> None:
        """Called while the prompt is read, and with every token."""
        if self.call.gone.is_set():
            raise ClientGoneError
        if self.stopping.is_set():
            raise StoppingError("the server is stopping")

    def put(self, value: Tensor) -> None:
        self.ask()
        if self.prompt:
            self.prompt = False
            return
        if not self.call.begun.done():
            self.call.begun.set_result(None)
        for token in value.tolist():
            entry = Entry(token) if self.call.recorder is None else self.call.recorder.take(token)
            self.call.entries.append(entry)
            self.waiting.append(entry)
            if self.live:
                self._write(self.decoding.step(self.tokenizer._tokenizer, token))

    def end(self) -> None:
        """Wait for :meth:`close`: the last event of a stream has the statistics."""

    def close(self) -> None:
        """Send what is left: bytes that end within a character, the answer's rest, tokens without a text."""
        bare = self.answer is None or self.call.options.forced is not None
        whole = text_of(self.tokenizer, self.call.ids, self.call.prompt.last, bare=bare)
        if (forced := self.call.options.forced) is not None:
            for value in forced_calls(whole, forced) or [whole]:
                self._piece(value)
        else:
            self._write(whole[len(self.sent) :] if whole.startswith(self.sent) else None)
            for value in self.answer.parts(over=True) if self.answer is not None else ():
                self._piece(value)
        if self.kept is not None:
            self._send_joined(self.kept)
        elif self.waiting and self.call.recorder is not None:
            self._piece("")

    def _write(self, text: str | None) -> None:
        if text:
            self.sent += text
            for value in [text] if self.answer is None else self.answer.parts(text):
                self._piece(value)

    def _send_joined(self, values: list[Any]) -> None:
        """Send a whole answer: its reasoning, its text with what is told of all tokens, its calls."""
        reasoning, content = ("".join(one for one in values if type(one) is kind) for kind in (ReasoningText, str))
        if self.answer is not None:
            reasoning, content = reasoning.strip(), self.answer.special.sub("", content).strip()
        calls = [one for one in values if isinstance(one, ToolCall)]
        if reasoning:
            self.send(Piece(ReasoningText(reasoning), []))
        if content or self.call.recorder is not None or not calls:
            self.send(Piece(content, self.waiting))
        for call in calls:
            self.send(Piece(call, []))

    def _piece(self, value: Any) -> None:
        if self.kept is not None:
            self.kept.append(value)
            return
        entries, self.waiting = self.waiting, []
        self.send(Piece(value, entries))
