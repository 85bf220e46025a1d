"""Text on stdout as it is accepted."""

from __future__ import annotations

from contextlib import ExitStack

from transformers import PreTrainedTokenizerBase, TextStreamer


class StdoutStreamer(TextStreamer):
    """Prints the continuation alone, and ends ``waiting`` (a progress display) before its first text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, waiting: ExitStack) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.waiting = waiting

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.waiting.close()
        super().on_finalized_text(text, stream_end)
