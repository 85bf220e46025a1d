"""The thread that decodes one text after another."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import time
import traceback
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase
from transformers.cli.serving.utils import GenerateManager

from gsd_kernels.config import AUTO, PLAIN
from gsd_kernels_hf.api import Patch
from gsd_kernels_hf.model import properties

from .calls import Call, ClientGoneError, Request, Writer
from .checks import Refused, one_line
from .generation import refused_config
from .logprobs import of_prompt

log = logging.getLogger(__name__)

_BAD = (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError)
"""What transformers raises for values that it cannot use."""


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
        try:
            self.submit(lambda: None).result(seconds)
        except concurrent.futures.TimeoutError:  # TimeoutError itself from Python 3.11 on
            return False
        return True

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
            options: dict[str, Any] = {"generation_config": config, **self._speculation(request, ids)}
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
        call.finish = self._finish(call)
        if request.is_content and call.ids and call.ids[-1] in request.ends:
            _check_json(self.tokenizer.decode(call.ids, skip_special_tokens=True))
        self._count(call, queued=begun - call.since)
        writer.close()

    def _speculation(self, request: Request, ids: torch.Tensor) -> dict[str, Any]:
        if not request.reference:
            return {}
        reference = {"reference_ids": ids.new_tensor(request.reference)}
        # Where the model decodes plainly, a text with a reference drafts all the same.
        return reference if self.handle.options.get("graph_config") != PLAIN else {**reference, "graph_config": AUTO}

    def _finish(self, call: Call) -> str:
        ids, config, most = call.ids, call.prompt.config, call.prompt.config.max_new_tokens
        ended = bool(ids) and ids[-1] in call.request.ends
        if not ended and config.stop_strings:
            text = self.tokenizer.decode(ids)
            ended = any(stop in text for stop in config.stop_strings)
        return "length" if not ended and most is not None and len(ids) >= most else "stop"

    def _count(self, call: Call, queued: float) -> None:
        if call.finish == "length" and not call.ids:  # nothing was decoded
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
