"""Text on stdout as it is accepted, and conversations."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer

from gsd_kernels_hf.model.properties import positions

from .output import err, progress
from .pair import LoadedPair


class StdoutStreamer(TextStreamer):
    """Prints the continuation alone, and ends ``waiting`` (a progress display) before its first text.

    Attributes:
        tokens: of the continuation, so far.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, waiting: ExitStack) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.waiting = waiting
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.tokens += value.flatten().tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.waiting.close()
        super().on_finalized_text(text, stream_end)


@dataclass
class Conversation:
    """The turns so far, and the model, patched or not, that answers them.

    Attributes:
        arguments: of the model's ``generate``.
        opening: turns before the first message.
        stops: whether Ctrl-C ends an answer alone, since somebody is there to go on.
    """

    pair: LoadedPair
    arguments: dict[str, Any]
    opening: list[dict[str, str]]
    stops: bool = False
    turns: list[dict[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the turns."""
        self.turns = list(self.opening)

    def answer(self, message: str) -> str:
        """Stream the answer to a message, and return it; of one that Ctrl-C stopped what was said by then.

        Raises:
            ValueError: the conversation has no position left for an answer; it is as it was before.
        """
        target, turns = self.pair.target, [*self.turns, {"role": "user", "content": message}]
        inputs = self.pair.chat(turns)
        most = self._room(inputs["input_ids"].shape[1])
        arguments = {**self.arguments, **self.pair.padding, "max_new_tokens": most}
        with ExitStack() as waiting:
            waiting.enter_context(progress("reading"))
            streamer = StdoutStreamer(self.pair.tokenizer, waiting)
            try:
                target.generate(**inputs, **arguments, streamer=streamer)
            except KeyboardInterrupt:
                streamer.end()
                if not self.stops:
                    raise
                err.print("(stopped)", style="dim")
        end = target.generation_config.eos_token_id
        if len(streamer.tokens) >= most and streamer.tokens[-1] not in (end if isinstance(end, list) else [end]):
            why = "--max-new-tokens" if most == self.arguments["max_new_tokens"] else "no position is left"
            err.print(f"(cut at {most} tokens: {why})", style="dim")
        answered = str(self.pair.tokenizer.decode(streamer.tokens, skip_special_tokens=True))
        self.turns = [*turns, {"role": "assistant", "content": answered}]
        return answered

    def _room(self, length: int) -> int:
        """New tokens of an answer behind ``length`` tokens, which ends where the model's positions do."""
        most = self.arguments["max_new_tokens"]
        limit = positions(self.pair.target)
        if limit is None:
            return most
        if length >= limit:
            raise ValueError(f"the conversation has {length} tokens, the model {limit} positions: /reset begins anew")
        return min(most, limit - length)
