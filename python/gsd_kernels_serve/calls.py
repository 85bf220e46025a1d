"""A request, read, and its texts on their way: what is asked for, and the thread that decodes one after another."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import logging
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase
from transformers.cli.serving.utils import GenerateManager, ReasoningText, ToolCall

from gsd_kernels.config import AUTO, PLAIN
from gsd_kernels_hf.api import Patch
from gsd_kernels_hf.model import properties

from . import fields
from .answers import Answer
from .checks import Json, Refused, one_line
from .generation import refused_config
from .logprobs import Entry, Place, Recorder, of_prompt
from .messages import Offered, forced_calls
from .schemas import Marked

log = logging.getLogger(__name__)


class ClientGoneError(Exception):
    """Ends the decoding of a text that nobody waits for."""

    def __init__(self) -> None:
        super().__init__("the client went away")


class StoppingError(RuntimeError):
    """Ends the decoding of all texts, because the server stops."""


class Penalties(LogitsProcessor):
    """OpenAI's penalties: logits fall with the number of times that the answer has a token, and that it has it at all.

    Args:
        prompt: number of tokens before the answer.
        frequency: times the count.
        presence: once.
    """

    def __init__(self, prompt: int, frequency: float, presence: float) -> None:
        self.prompt, self.frequency, self.presence = prompt, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = input_ids[:, self.prompt :].to(scores.device)
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


@dataclass
class Prompt:
    """Tokens to go on from.

    Attributes:
        ids: of them.
        shown: what is put before each text.
        last: of the tokens, where a text goes on what they say.
        config: of the texts behind it.
        told: its log-probabilities, once they are formed.
    """

    ids: list[int]
    shown: str = ""
    last: list[int] = field(default_factory=list)
    config: GenerationConfig = field(init=False)
    told: Json | None = None


@dataclass
class Request:
    """A request, read: its prompts, and what is asked of their texts.

    Attributes:
        body: its fields, checked.
        prompts: B of them.
        named: arguments that ``generation_config`` names: what ``generate`` then refuses is its.
        top: likeliest tokens to record with their log-probabilities; ``None``: no log-probabilities.
        offered: functions; none for ``tool_choice: "none"``.
        held: the JSON schema that a text is held to, and the field that asks for it; ``None``: it is free.
        grammar: that schema, compiled.
        reference: tokens that the texts may repeat, or ``None``.
        id, since: of the request, by what it came with; ``since`` in Unix seconds.
        gone: set once the client has closed its connection.
        calls: its texts.
    """

    body: Json
    prompts: list[Prompt]
    named: Json
    top: int | None = None
    offered: Offered = field(default_factory=Offered)
    held: tuple[Any, str] | None = None
    grammar: Any = None
    reference: list[int] | None = None
    id: str = ""
    gone: threading.Event = field(default_factory=threading.Event)
    since: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        copies = self.body.get("n", 1)
        if (texts := len(self.prompts) * copies) > fields.MAX_TEXTS:
            raise Refused("n", f"{texts} texts of a request; {fields.MAX_TEXTS} at most")
        if self.body.get("stream_options") and not self.stream:
            raise Refused("stream_options", "needs stream: true")
        self.calls = [
            Call(self, prompt, number, f"/{index}" if texts > 1 else "")
            for index, (prompt, number) in enumerate(itertools.product(self.prompts, range(copies)))
        ]

    @property
    def stream(self) -> bool:
        """Return whether the client gets events."""
        return bool(self.body.get("stream"))

    @property
    def ends(self) -> list[int]:
        """Tokens that end a text."""
        ends = self.prompts[0].config.eos_token_id
        return [] if ends is None else ends if isinstance(ends, list) else [ends]

    @property
    def is_content(self) -> bool:
        """Return whether a whole text is JSON by a grammar: content, whatever the prompt has begun."""
        return self.offered.forced is not None or (self.held is not None and not isinstance(self.held[0], Marked))

    def processors(self, prompt: int) -> list[LogitsProcessor]:
        """New ones, for one text behind ``prompt`` tokens."""
        penalties = [float(self.body.get(f"{name}_penalty", 0)) for name in ("frequency", "presence")]
        found: list[LogitsProcessor] = [Penalties(prompt, *penalties)] if any(penalties) else []
        if self.grammar is not None:
            from xgrammar.contrib.hf import LogitsProcessor as Grammar

            found.append(Grammar(self.grammar))
        return found

    def statistics(self) -> Json:
        """Statistics of the texts: of the only one, or a list."""
        statistics = [call.statistics for call in self.calls]
        return {"gsd_kernels": statistics[0] if len(statistics) == 1 else statistics}

    def counted(self) -> Json:
        """``usage``: a prompt counts once, whatever the number of its texts."""
        prompt = sum(len(prompt.ids) for prompt in self.prompts)
        answer = sum(len(call.ids) for call in self.calls)
        return {"usage": {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}}


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
        request: that it belongs to.
        prompt: what it is behind.
        number: of the text in its prompt's, which is added to the seed.
        part: of the request, by which the log names the text.
        recorder: of log-probabilities, or ``None``.
        statistics: of the decoding, plain data.
        ids: its tokens.
        pieces: of an answer that is told as a whole.
        finish: ``"stop"``, or ``"length"`` for a text that was cut.
        since: when the request came, by ``time.perf_counter``.
        echoed: tokens of the prompt with their log-probabilities, where they are asked for.
        made: calls of functions that have been sent.
        place: of the next token in a streamed text.
    """

    request: Request
    prompt: Prompt
    number: int
    part: str
    statistics: Json | None = None
    ids: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    finish: str | None = None
    since: float = field(default_factory=time.perf_counter)
    echoed: list[Entry] = field(default_factory=list)
    made: int = 0

    def __post_init__(self) -> None:
        self.place = Place(self.prompt.shown)
        top = self.request.top
        self.recorder = None if top is None else Recorder(top)

    @property
    def seed(self) -> int:
        """Of its noise; a new one where the request has none."""
        # transformers' server seeds torch when a request comes; until its turn others may have drawn.
        seed = self.request.body.get("seed")
        return secrets.randbits(63) if seed is None else (seed + self.number) % 2**64


class Writer:
    """The streamer of a decoding: keeps a text's tokens with their log-probabilities, and makes pieces of a stream's.

    Every piece of the prompt and every token is an occasion to end the decoding.

    Args:
        call: the text's.
        tokenizer: the model's.
        stopping: set when the server stops.
        answer: reads the text's parts; ``None``: it is text alone.
        send: takes ``None`` with the first token, and every piece. Those of a stream are sent as soon as they are
            clear; others once the text is over, joined and without the white space around them.

    Attributes:
        begun: whether the text has a token, or is over without one; until then a stream can be refused.
    """

    begun = False

    def __init__(
        self,
        call: Call,
        tokenizer: PreTrainedTokenizerBase,
        stopping: threading.Event,
        answer: Answer | None,
        send: Callable[[Piece | None], None],
    ) -> None:
        self.call, self.tokenizer, self.stopping, self.answer, self.send = call, tokenizer, stopping, answer, send
        self.forced = call.request.offered.forced
        self.live = call.request.stream and self.forced is None
        self.decoding = DecodeStream(call.prompt.last, skip_special_tokens=answer is None)
        self.prompt = True  # comes first
        self.waiting: list[Entry] = []
        self.kept: list[Any] | None = None if call.request.stream else []
        self.sent = ""

    def ask(self) -> None:
        """Called while the prompt is read, and with every token."""
        if self.call.request.gone.is_set():
            raise ClientGoneError
        if self.stopping.is_set():
            raise StoppingError("the server is stopping")

    def begin(self) -> None:
        """Called with the first token, or where there is none."""
        if not self.begun:
            self.begun = True
            self.send(None)
            self._tell(self.answer.begun if self.answer is not None else ())

    def put(self, value: Tensor) -> None:
        self.ask()
        if self.prompt:
            self.prompt = False
            return
        self.begin()
        for token in value.tolist():
            self.waiting.append(Entry(token) if self.call.recorder is None else self.call.recorder.take(token))
            if self.live:
                self._write(self.decoding.step(self.tokenizer._tokenizer, token))

    def end(self) -> None:
        """Wait for :meth:`close`: the last event of a stream has the statistics."""

    def close(self) -> None:
        """Send what is left: bytes that end within a character, the answer's rest, tokens without a text."""
        self.begin()
        decode = partial(self.tokenizer.decode, skip_special_tokens=self.answer is None or self.forced is not None)
        ids, before = self.call.ids, self.call.prompt.last  # by themselves SentencePiece's lose their first space
        begin, whole = decode(before), decode([*before, *ids])
        whole = whole[len(begin) :] if whole.startswith(begin) else decode(ids)
        if self.forced is not None:
            self._tell(forced_calls(whole, self.forced) or [whole])
        else:
            self._write(whole[len(self.sent) :] if whole.startswith(self.sent) else None)
            self._tell(self.answer.parts(over=True) if self.answer is not None else ())
        if self.kept is not None:
            self._send_joined(self.kept)
        elif self.waiting and self.call.recorder is not None:
            self._tell([""])

    def _write(self, text: str | None) -> None:
        if text:
            self.sent += text
            self._tell([text] if self.answer is None else self.answer.parts(text))

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

    def _tell(self, values: Iterable[Any]) -> None:
        for value in values:
            if self.kept is not None:
                self.kept.append(value)
                continue
            entries, self.waiting = self.waiting, []
            self.send(Piece(value, entries))


_BAD = (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError)
"""What transformers raises for values that it cannot use."""


def forget_calls(error: BaseException | None) -> None:
    """Let go of the variables of all calls that an error and those before it came through, caches among them.

    An error outlives its text: a future, a queue and a log have it, in cycles that the garbage collection finds late.
    """
    known: set[int] = set()
    while error is not None and id(error) not in known:
        known.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Queue(GenerateManager):
    """transformers' thread that decodes one text after another; each with its seed and its statistics.

    Args:
        handle: the patched model's.
        tokenizer: the model's.
    """

    def __init__(self, handle: Patch, tokenizer: PreTrainedTokenizerBase) -> None:
        self.handle, self.tokenizer = handle, tokenizer
        super().__init__()

    def wait(self, seconds: float) -> bool:
        """Wait until the thread is idle; whether it is."""
        return bool(concurrent.futures.wait([self.submit(lambda: None)], seconds).done)

    def decode(self, writer: Writer) -> None:
        """Decode a text, on the thread.

        Raises:
            TypeError, ValueError: the request cannot be served.
            ClientGoneError, StoppingError: nobody waits for the text.
        """
        call, begun, model = writer.call, time.perf_counter(), self.handle.model
        request, config = call.request, call.prompt.config
        try:
            writer.ask()
            ids = torch.tensor([call.prompt.ids], device=properties.device_of(model), dtype=torch.int64)  # [1, P]
            prompt = ids.shape[1]
            options: Json = {"generation_config": config}
            if request.reference:
                options["reference_ids"] = ids.new_tensor(request.reference)
                if self.handle.options.get("graph_config") == PLAIN:  # a text with a reference drafts all the same
                    options["graph_config"] = AUTO
            if processors := request.processors(prompt):
                options["logits_processor"] = LogitsProcessorList(processors)
            if request.body.get("echo") and request.top is not None:
                call.echoed = of_prompt(model, ids, request.top, writer.ask)
            options |= {"tokenizer": self.tokenizer, "seed": call.seed, "streamer": writer, "observer": call.recorder}
            output = ids if config.max_new_tokens == 0 else model.generate(ids, **options)
        except Exception as error:
            reason = one_line(ClientGoneError() if request.gone.is_set() else error)
            log.warning("%s%s ended after %.2f s: %s", request.id, call.part, time.perf_counter() - begun, reason)
            forget_calls(error)
            if isinstance(error, AssertionError) and (held := request.held):  # xgrammar's
                field = held[1].partition(".")[0]
                error = ValueError(f"{field}: other options leave no token with which its grammar goes on")
            if request.named and isinstance(error, _BAD) and not isinstance(error, Refused):
                error = refused_config(request.named, error)
            raise error
        call.ids = output[0, prompt:].tolist()
        if request.is_content and call.ids and call.ids[-1] in request.ends:
            try:  # before it is told as JSON
                json.loads(self.tokenizer.decode(call.ids, skip_special_tokens=True))
            except ValueError as error:  # the grammar's fault
                raise ValueError(f"the answer was held to a schema, and is no JSON: {error}") from error
        self._conclude(call, queued=begun - call.since)
        writer.close()

    def _conclude(self, call: Call, queued: float) -> None:
        """Say why a text ends, and its statistics."""
        ids, config = call.ids, call.prompt.config
        most = config.max_new_tokens
        ended = bool(ids) and ids[-1] in call.request.ends
        if not ended and config.stop_strings:
            text = self.tokenizer.decode(ids)
            ended = any(stop in text for stop in config.stop_strings)
        call.finish = "length" if not ended and most is not None and len(ids) >= most else "stop"
        if call.finish == "length" and not ids:  # nothing was decoded
            call.statistics = {"new_tokens": 0, "queued": queued}
            return
        stats = self.handle.stats  # of this thread
        call.statistics = {**stats.as_dict(), "queued": queued}
        log.info(
            "%s%s: %d + %d tokens, %d steps, %.2f tokens a step, %.2f s, queued %.2f s",
            call.request.id,
            call.part,
            len(call.prompt.ids),
            stats.new_tokens,
            stats.steps,
            stats.tokens_per_step,
            stats.seconds["total"],
            queued,
        )
