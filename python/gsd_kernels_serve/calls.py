"""One text on its way: from the handler that reads its request to the thread that decodes it, and back."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase

from gsd_kernels.config import AUTO
from gsd_kernels_hf.api import Patch

from .answers import Answer, text_of
from .checks import Refused
from .logprobs import Entry, Recorder, of_prompt
from .text_options import TextOptions, refused_config
from .tools import forced_calls

log = logging.getLogger(__name__)

_BAD = (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError)
"""What transformers raises for values that it cannot use."""


class ClientGoneError(Exception):
    """Ends the decoding of a text that nobody waits for."""


class StoppingError(RuntimeError):
    """Ends the decoding of all texts, because the server stops."""


@dataclass(eq=False)
class Call:
    """A text that is asked for and, once it is decoded, what became of it.

    Attributes:
        options: what its request asks for.
        number: of the text in its request, which is added to the seed.
        gone: set once the client has closed its connection.
        recorder: of log-probabilities, or ``None``.
        statistics: of the decoding, plain data.
        ids: its tokens.
        begun: done with the text's first token or with an error in its place; until then a stream can be refused.
        finish: ``"stop"``, or ``"length"`` for a text that was cut.
        since: when the request came, by ``time.perf_counter``.
        echoed: tokens of the prompt with their log-probabilities, where they are asked for.
    """

    options: TextOptions
    number: int = 0
    gone: threading.Event = field(default_factory=threading.Event)
    recorder: Recorder | None = None
    statistics: dict[str, Any] | None = None
    ids: list[int] = field(default_factory=list)
    begun: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)
    finish: str | None = None
    since: float = field(default_factory=time.perf_counter)
    echoed: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
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


@dataclass
class Piece:
    """Part of a text: what a stream's next event says.

    Attributes:
        value: a string; transformers' ``ReasoningText`` or ``ToolCall`` where its parser found one.
        entries: the tokens that it was made of.
    """

    value: Any
    entries: list[Entry]


class Writer:
    """A streamer that keeps a text's tokens with their log-probabilities and, for a stream, makes pieces of them.

    Args:
        call: the text's.
        tokenizer: the model's.
        answer: reads the parts of a stream's text; ``None``: it is text alone.
        before: the last tokens of a prompt that the text goes on from.
    """

    def __init__(
        self, call: Call, tokenizer: PreTrainedTokenizerBase, answer: Answer | None = None, before: Sequence[int] = ()
    ) -> None:
        self.call, self.tokenizer, self.answer, self.before = call, tokenizer, answer, list(before)
        self.send: Callable[[Piece], None] | None = None
        self.decoding = DecodeStream(self.before, skip_special_tokens=answer is None)
        self.prompt = True  # comes first
        self.entries: list[Entry] = []
        self.waiting: list[Entry] = []
        self.sent = ""

    def begin(self, send: Callable[[Piece], None]) -> None:
        """Stream: every piece goes to ``send``."""
        self.send = send
        for value in self.answer.begun if self.answer is not None else ():
            self._piece(value)

    def put(self, value: Tensor) -> None:
        if self.prompt:
            self.prompt = False
            return
        for token in value.tolist():
            entry = Entry(token) if self.call.recorder is None else self.call.recorder.take(token)
            self.entries.append(entry)
            if self.send is not None:
                self.waiting.append(entry)
                self._write(self.decoding.step(self.tokenizer._tokenizer, token))

    def _write(self, text: str | None) -> None:
        if not text or self.call.options.forced is not None:
            return
        self.sent += text
        for value in [text] if self.answer is None else self.answer.feed(text):
            self._piece(value)

    def _piece(self, value: Any) -> None:
        if self.send is not None:
            entries, self.waiting = self.waiting, []
            self.send(Piece(value, entries))

    def end(self) -> None:
        """Send what is left: bytes that end within a character, the answer's rest, tokens without a text."""
        if self.send is None:
            return
        bare = self.answer is None or self.call.options.forced is not None
        whole = text_of(self.tokenizer, self.call.ids, self.before, bare=bare)
        if (forced := self.call.options.forced) is not None:
            for value in forced_calls(whole, forced) or [whole]:
                self._piece(value)
        else:
            self._write(whole[len(self.sent) :] if whole.startswith(self.sent) else None)
            for value in self.answer.end() if self.answer is not None else ():
                self._piece(value)
        if self.waiting and self.call.recorder is not None:
            self._piece("")


def _check_json(text: str) -> None:
    """Read an answer that was held to a schema once, before it is told as JSON.

    Raises:
        ValueError: it is none, by the grammar's fault.
    """
    try:
        json.loads(text)
    except ValueError as error:
        raise ValueError(f"the answer was held to a schema, and is no JSON: {error}") from error


def forget_calls(error: BaseException | None) -> None:
    """Let go of the variables of all calls that an error and those before it came through, caches among them.

    An error outlives its text: a future, a queue and a log have it, in cycles that the garbage collection finds late.
    """
    known: set[int] = set()
    while error is not None and id(error) not in known:
        known.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Listener:
    """A streamer between a decoding and the one of its request, if that has one.

    Every piece of the prompt and every token is an occasion to end the decoding. ``end`` is passed on once the
    statistics are there, as the last event of a stream carries them.
    """

    def __init__(self, call: Call, stopping: threading.Event, inner: Any = None) -> None:
        self.call, self.stopping, self.inner = call, stopping, inner
        self.prompt = True  # comes first

    def ask(self) -> None:
        """Called while the prompt is read, and with every token."""
        if self.call.gone.is_set():
            raise ClientGoneError
        if self.stopping.is_set():
            raise StoppingError("the server is stopping")

    def put(self, value: Tensor) -> None:
        self.ask()
        if not self.prompt and not self.call.begun.done():
            self.call.begun.set_result(None)
        self.prompt = False
        if self.inner is not None:
            self.inner.put(value)

    def end(self) -> None:
        """Wait for :meth:`Decoding.generate`."""


class Decoding:
    """The ``model`` of one text, of which transformers' server calls ``generate`` alone.

    Args:
        handle: the patched model's.
        call: the text.
        name: of the request in the log.
        stopping: set when the server stops.
        speculates: whether the model drafts; where it decodes plainly, a text with a reference drafts all the same.
    """

    def __init__(self, handle: Patch, call: Call, name: str, stopping: threading.Event, speculates: bool) -> None:
        self.handle, self.call, self.name, self.stopping = handle, call, name, stopping
        self.speculates = speculates

    def generate(self, input_ids: Tensor, tokenizer: PreTrainedTokenizerBase, **kwargs: Any) -> Tensor:
        """Decode, on the thread of all decodings.

        Args:
            input_ids: int64 [1, P].
            tokenizer: the model's.
            **kwargs: mask, config and streamer of transformers' server.

        Raises:
            TypeError, ValueError: the request cannot be served.
            ClientGoneError, StoppingError: nobody waits for the text.
        """
        call, begun, prompt = self.call, time.perf_counter(), input_ids.shape[1]
        inner = kwargs.pop("streamer", None)
        streamer = Listener(call, self.stopping, inner)
        try:
            streamer.ask()
            config = call.options.fitted(prompt)
            kwargs |= {"generation_config": config, **self._speculation(input_ids)}
            if processors := call.options.processors(prompt):
                kwargs["logits_processor"] = LogitsProcessorList(processors)
            if call.options.echoes and call.options.top is not None:
                call.echoed = of_prompt(self.handle.model, input_ids, call.options.top, streamer.ask)
            kwargs |= {"tokenizer": tokenizer, "seed": call.seed, "streamer": streamer, "observer": call.recorder}
            output = input_ids if config.max_new_tokens == 0 else self.handle.model.generate(input_ids, **kwargs)
        except Exception as error:
            reason = (
                "the client went away" if call.gone.is_set() else " ".join(str(error).split()) or type(error).__name__
            )
            log.warning("%s ended after %.2f s: %s", self.name, time.perf_counter() - begun, reason)
            forget_calls(error)
            if call.options.named and isinstance(error, _BAD) and not isinstance(error, Refused):
                error = refused_config(call.options.named, error)
            call.fail(error)
            raise error
        if not call.begun.done():  # it has no token
            call.begun.set_result(None)
        call.ids = output[0, prompt:].tolist()
        call.finish = self._finish(config, tokenizer)
        if call.options.is_content and call.ids and call.ids[-1] in call.options.ends:
            _check_json(tokenizer.decode(call.ids, skip_special_tokens=True))
        self._count(prompt, queued=begun - call.since)
        if inner is not None:
            inner.end()
        return output

    def _speculation(self, input_ids: Tensor) -> dict[str, Any]:
        if not self.call.options.reference:
            return {}
        reference = {"reference_ids": input_ids.new_tensor(self.call.options.reference)}
        return reference if self.speculates else {**reference, "graph_config": AUTO}

    def _finish(self, config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> str:
        ids, most = self.call.ids, config.max_new_tokens
        ended = bool(ids) and ids[-1] in self.call.options.ends
        if not ended and config.stop_strings:
            text = tokenizer.decode(ids)
            ended = any(stop in text for stop in config.stop_strings)
        return "length" if not ended and most is not None and len(ids) >= most else "stop"

    def _count(self, prompt: int, queued: float) -> None:
        if self.call.finish == "length" and not self.call.ids:  # nothing was decoded
            self.call.statistics = {"new_tokens": 0, "queued": queued}
            return
        stats = self.handle.stats  # of this thread
        self.call.statistics = {**stats.as_dict(), "queued": queued}
        log.info(
            "%s: %d + %d tokens, %d steps, %.2f tokens a step, %.2f s, queued %.2f s",
            self.name,
            prompt,
            stats.new_tokens,
            stats.steps,
            stats.tokens_per_step,
            stats.seconds["total"],
            queued,
        )
