"""Text on stdout as it is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer


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


def is_cut(model: PreTrainedModel, tokens: Sequence[int], most: int) -> bool:
    """Return whether a text of at most ``most`` new tokens ends because it may not go on."""
    end = model.generation_config.eos_token_id
    ends = end if isinstance(end, (list, tuple)) else [end]
    return len(tokens) >= most and tokens[-1] not in ends
