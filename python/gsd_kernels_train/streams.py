"""Files, the streams of tokens that they become, and batches of windows that are cut out of these."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gsd_kernels_hf.files import decode_utf8, read_file
from gsd_kernels_hf.progress import tracked

from .clock import RunClock


def read_texts(name: str, files: list[Path], clock: RunClock, digest: Any) -> Iterator[tuple[Path, str]]:
    """Every file with its text, which goes into ``digest`` as well; ``name``: the option that named them.

    Raises:
        ValueError: a folder, or a file that is not UTF-8.
        OSError: a file cannot be read.
        RuntimeError: the clock's minutes are over.
    """
    with tracked(f"reading {name}", len(files), "files") as update:
        for number, file in enumerate(files):
            update(number)
            clock.check(f"reading {name}, {number} of {len(files)} files")
            if file.is_dir():
                raise ValueError(f"{name}: {file} is a folder; name its files (the shell expands {file}/*)")
            data = read_file(file, name)
            digest.update(hashlib.sha256(data).digest())
            yield file, decode_utf8(data, name, file)


@dataclass(frozen=True)
class Stream:
    """Tokens of one text after another.

    Attributes:
        tokens: int32 [N].
        counted: bool [N], tokens whose guesses are learned and measured; ``None``: all.
        starts: int64, ascending, where windows begin; ``None``: anywhere.
        answers: int64, ascending, where what the target would write begins; ``None``: anywhere.
    """

    tokens: np.ndarray
    counted: np.ndarray | None = None
    starts: np.ndarray | None = None
    answers: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def before_answers(self, length: int) -> Stream:
        """The same with windows that end where an answer begins; itself where there are none."""
        if self.answers is None:
            return self
        return Stream(self.tokens, self.counted, self.answers[self.answers >= length] - length)

    def places(self, length: int) -> np.ndarray:
        """Where whole windows of ``length`` tokens that do not overlap begin; those of ``starts`` may."""
        if self.starts is None:
            return np.arange(len(self) // length) * length
        return self.starts[self.starts + length <= len(self)]

    def at(self, places: np.ndarray, length: int) -> np.ndarray:
        """Index of the tokens of windows, int64 [windows, length]."""
        return places[:, None] + np.arange(length)


def blocks(stream: Stream, length: int, most: int) -> tuple[Tensor, Tensor | None]:
    """At most ``most`` windows, evenly spaced.

    Returns:
        int64 [windows, length], and which of their tokens count, bool alike; ``None``: all.
    """
    places = stream.places(length)
    chosen = np.unique(np.linspace(0, len(places) - 1, min(len(places), most)).round().astype(int))
    index = stream.at(places[chosen], length)
    counted = None if stream.counted is None else torch.from_numpy(stream.counted[index])
    return torch.from_numpy(stream.tokens[index].astype(np.int64)), counted


class Streams:
    """Token streams with a share each; a batch is a pure function of its step number, so a run can resume."""

    def __init__(self, streams: list[tuple[float, Stream]], seed: int, tokens: int) -> None:
        self.streams = streams
        self.tokens = tokens
        self.seed = seed

    def batch(self, step: int, length: int) -> tuple[Tensor, ...]:
        """Return random windows, ``tokens`` in all and one more per window.

        Returns:
            ([windows, length + 1],), int64; and bool alike, which of their tokens count, where not all of all do.
        """
        rng = np.random.default_rng([self.seed, step])
        windows = self.tokens // length
        choice = rng.choice(len(self.streams), size=windows, p=[share for share, _ in self.streams])
        rows, counted = [], []
        for index in choice:
            stream = self.streams[index][1]
            if stream.starts is None:
                start = rng.integers(0, len(stream) - length)
            else:
                places = stream.places(length + 1)
                start = places[rng.integers(len(places))]
            cut = slice(start, start + length + 1)
            rows.append(stream.tokens[cut].astype(np.int64))
            counted.append(np.ones(length + 1, dtype=bool) if stream.counted is None else stream.counted[cut])
        found = torch.from_numpy(np.stack(rows))
        if all(stream.counted is None for _, stream in self.streams):
            return (found,)
        return found, torch.from_numpy(np.stack(counted))


def mean_of(loss: Tensor, counted: Tensor | None) -> Tensor:
    """Mean of losses [...], of those that count (bool [...]; ``None``: all); 0 where none does."""
    return loss.mean() if counted is None else (loss * counted).sum() / counted.sum().clamp(min=1)
