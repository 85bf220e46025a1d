"""Tokens to a streamer, as transformers hands them over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Streaming:
    """One ``put`` for every position of the whole batch, int64 [B], in order; a sequence that ended is padded.

    Sequences advance at different speeds here, so what faster ones emit is held back until the slowest gets there.

    Args:
        streamer: has ``put`` and ``end``; it was given the prompt.
        batch: sequences.
        pad: token behind the end of a text.
    """

    def __init__(self, streamer: Any, batch: int, pad: int) -> None:
        self.streamer, self.pad = streamer, pad
        self.texts: list[list[int]] = [[] for _ in range(batch)]
        self.count = 0  # positions handed over

    def add(self, emitted: Sequence[Sequence[int]], done: Sequence[bool], lengths: Sequence[int] | None) -> None:
        """Take what a step emitted, and hand over what is complete.

        Args:
            emitted: tokens, by sequence.
            done: whether each has ended.
            lengths: new tokens of each that stay, where some may be taken back; ``None``: all do.
        """
        for text, tokens in zip(self.texts, emitted, strict=True):
            text += tokens
        for text, length in zip(self.texts, lengths or (), strict=False):
            del text[length:]
        growing = [len(text) for text, ended in zip(self.texts, done, strict=True) if not ended]
        known = min(growing) if growing else max(map(len, self.texts))
        for at in range(self.count, known):
            self.streamer.put(
                torch.tensor(
                    [text[at] if at < len(text) else self.pad for text in self.texts], dtype=torch.int64, device="cpu"
                )
            )
        self.count = max(self.count, known)

    def end(self) -> None:
        """After the last token."""
        self.streamer.end()
