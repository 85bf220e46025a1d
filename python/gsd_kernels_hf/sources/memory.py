"""The tables that the history begins with: what one call leaves to the next, and the file of ``gsd_kernels.learn``.

The file has how a model's own answers go on, and the weights of the history's mixture. Some come with this package,
each for one published model in all its forms.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, reduce
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gsd_kernels import NgramTable
from gsd_kernels.ops.history import WEIGHTS
from gsd_kernels.ops.history.records import LEARNED_ORDERS, REMEMBERED
from gsd_kernels.ops.ngram.reference import sets_of

from ..files import path_of
from ..locks import forkable_lock
from ..store import damaged, read_saved, write_saved

HISTORY = ("gsd_kernels history", 1)
LEARNED = ("gsd_kernels learned", 1)
"""Formats of files and their versions."""
TENSORS = ("keys", "tokens", "log_probs")


def each(table: NgramTable, change: Callable[[Tensor], Tensor]) -> NgramTable:
    """A table whose tensors are changed alike."""
    return replace(table, **{name: change(getattr(table, name)) for name in TENSORS})


def fit(one: NgramTable, other: NgramTable) -> bool:
    """Return whether two tables have the same sets."""
    sizes = [(table.keys.shape[1:], table.max_context, table.ways) for table in (one, other)]
    return sizes[0] == sizes[1]


def before(newer: NgramTable, older: NgramTable) -> NgramTable:
    """Both sequences' tables in one: a set's entries, then those of the older one's set, as far as there is room."""
    width = max(newer.tokens.shape[2], older.tokens.shape[2])
    device, sets = newer.keys.device, (-1, newer.ways)
    ours, theirs = newer.keys.view(sets), older.keys.to(device).view(sets)
    again = (theirs[:, :, None] == ours[:, None, :]).any(2)
    keys = torch.cat([ours, torch.where(again, 0, theirs)], 1)
    kept = (keys == 0).to(torch.uint8).sort(dim=1, stable=True).indices[:, : newer.ways]  # [sets, ways]

    def both(mine: Tensor, other: Tensor, nothing: float) -> Tensor:
        parts = [torch.nn.functional.pad(t, (0, width - t.shape[2]), value=nothing) for t in (mine, other.to(device))]
        whole = torch.cat([t.view(-1, newer.ways, width) for t in parts], 1)
        return whole.gather(1, kept[..., None].expand(-1, -1, width)).view(1, -1, width)

    tokens = both(newer.tokens, older.tokens, -1)
    log_probs = both(newer.log_probs, older.log_probs, 0.0)
    return replace(newer, keys=keys.gather(1, kept).view(1, -1), tokens=tokens, log_probs=log_probs)


class HistoryMemory:
    """Continuations that the history remembers from call to call of a patched model, ``handle.history``.

    At the end of a call what its history holds is taken over, whatever the batch and the sampling were; the next call
    whose text does not continue an earlier one begins with it. As many contexts as one call's table has (32,768), of
    which the least recently seen go. It is the same for all threads and changes the speed, never the output.

    Args:
        vocab_size: of the target.

    Attributes:
        era: another object from every :meth:`clear` or :meth:`load` on: what was known before is not to come back.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._kept: NgramTable | None = None  # of one sequence; its tensors are never written again
        self._lock = forkable_lock()
        self.era = object()

    def __repr__(self) -> str:
        return f"<HistoryMemory: {len(self):,} contexts of a vocabulary of {self.vocab_size:,} tokens>"

    def __len__(self) -> int:
        """Contexts that are remembered."""
        kept = self._kept
        return 0 if kept is None else int((kept.keys != 0).sum())

    def serve(self, vocab_size: int) -> None:
        """Forget everything if the target's embeddings were resized meanwhile."""
        if vocab_size != self.vocab_size:
            self.vocab_size = vocab_size
            self.clear()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept, self.era = None, object()

    def add(self, table: NgramTable, began: NgramTable | None) -> NgramTable | None:
        """Take over what a call's table holds, of all its sequences.

        Args:
            table: of the call.
            began: what it holds in any case, as far as it has room: what :meth:`restore` or ``add`` returned.

        Returns:
            What it holds in any case from here on, of all that is remembered now.
        """
        first, *others = [each(table, itemgetter(slice(row, row + 1))) for row in range(len(table.keys))]
        newest = reduce(before, others, each(first, Tensor.clone))  # the call's table goes on being written
        with self._lock:
            older = self._kept
            if older is not None and older is not began and fit(older, table):  # other calls ended meanwhile
                self._kept = before(newest, older)
                return began
            self._kept = newest
        return newest

    def restore(self, table: NgramTable) -> NgramTable | None:
        """Write what is remembered into every sequence of an empty table, in place; return it."""
        kept = self._kept
        if kept is None or not fit(kept, table):
            return None
        for name in TENSORS:
            mine, theirs = getattr(table, name), getattr(kept, name)
            width = min(mine.shape[-1], theirs.shape[-1])
            mine[..., :width].copy_(theirs[..., :width])
        return kept

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write what is remembered to a safetensors file, as a whole or not at all.

        Raises:
            ValueError: nothing is remembered yet.
        """
        kept = self._kept
        if kept is None:
            raise ValueError("history: nothing is remembered yet; generate with the history as a source first")
        tensors = {name: getattr(kept, name)[0] for name in TENSORS}
        sizes = {"max_context": kept.max_context, "ways": kept.ways, "vocab_size": self.vocab_size}
        write_saved(path_of(file), *HISTORY, tensors, **sizes)

    def load(self, file: str | os.PathLike[str]) -> None:
        """Remember what :meth:`save` wrote, instead of what is remembered now.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged, of a newer version, of another vocabulary, or something else. What was
                remembered is kept.
        """
        place, foreign = path_of(file), "is no saved history; handle.history.save writes one"
        tensors, about = read_saved(place, "history", *HISTORY, foreign=foreign)
        if about["vocab_size"] != str(self.vocab_size):
            raise ValueError(
                f"history: {place} is of a vocabulary of {about['vocab_size']} tokens, the target has "
                f"{self.vocab_size}; load what was saved for this target"
            )
        parts = {name: tensors[name][None] for name in TENSORS}
        kept = NgramTable(**parts, max_context=int(about["max_context"]), ways=int(about["ways"]))
        with self._lock:
            self._kept, self.era = kept, object()


# What a model learned.

MOST_CONTEXTS = 1 << 20
WAYS = 8


class Known(NamedTuple):
    """The learned part of a model, as the history takes it."""

    table: NgramTable  # of one sequence
    weights: Tensor  # float64, of the mixture


@dataclass(frozen=True)
class Learned:
    """The learned part of a model, as its file has it.

    Attributes:
        keys: int64 [N], of contexts of 1 … 3 tokens, each once.
        counts: uint8 [N], continuations of each, 1 … 8.
        tokens: int32 [M], the continuations one context after the other, best first.
        log_probs: float16 [M].
        weights: float64 of the mixture.
        vocab_size: of the model.
        fingerprint: of the model.
        seen: tokens of answers that it was learned from.
    """

    keys: Tensor
    counts: Tensor
    tokens: Tensor
    log_probs: Tensor
    weights: Tensor
    vocab_size: int
    fingerprint: str
    seen: int

    def table(self, device: torch.device | str = "cpu") -> NgramTable:
        """The contexts as a table of one sequence; of a set that is full the last contexts are left out."""
        capacity = 1 << max(6, (2 * len(self.keys) - 1).bit_length())
        made = NgramTable.empty(1, REMEMBERED, "cpu", capacity=capacity, max_context=LEARNED_ORDERS, ways=WAYS)
        home = sets_of(self.keys, capacity // WAYS)
        by_set, order = home.sort(stable=True)
        way = torch.arange(len(order), device="cpu") - torch.searchsorted(by_set, by_set)  # place in its set
        kept = way < WAYS
        at, order = (by_set * WAYS + way)[kept], order[kept]
        ends = self.counts.long().cumsum(0)
        rank = torch.arange(REMEMBERED, device="cpu")
        inside = rank < self.counts[order].long()[:, None]  # [N, K]
        place = ((ends - self.counts)[order, None] + rank).clamp(max=max(0, len(self.tokens) - 1))
        made.keys[0, at] = self.keys[order]
        made.tokens[0, at] = torch.where(inside, self.tokens[place], -1)
        made.log_probs[0, at] = torch.where(inside, self.log_probs[place].float(), 0.0)
        return NgramTable(*(t.to(device) for t in (made.keys, made.tokens, made.log_probs)), LEARNED_ORDERS, WAYS)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write a safetensors file, as a whole or not at all."""
        tensors = {name: part for name, part in vars(self).items() if isinstance(part, Tensor)}
        about = {name: part for name, part in vars(self).items() if name not in tensors}
        write_saved(path_of(file), *LEARNED, tensors, **about)


def read_learned(file: str | os.PathLike[str], *, fingerprint: str, vocab_size: int) -> Learned:
    """Read what :meth:`Learned.save` wrote for this model.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is of another model, damaged, of a newer version, or something else.
    """
    place, foreign = path_of(file), "was not written by gsd-kernels learn"
    tensors, about = read_saved(place, "learned", *LEARNED, foreign=foreign)
    if about["fingerprint"] != fingerprint:
        raise ValueError(f"learned: {place} is of another model; run gsd-kernels learn for this one")
    if about["vocab_size"] != str(vocab_size):
        raise damaged("learned", place, f"a vocabulary of {about['vocab_size']} tokens, not {vocab_size}")
    if len(tensors["weights"]) != WEIGHTS:
        raise damaged("learned", place, f"{len(tensors['weights'])} weights, not {WEIGHTS}")
    return Learned(**tensors, vocab_size=vocab_size, fingerprint=fingerprint, seen=int(about["seen"]))


# Files that come with this package. A model is told by all its weights of one dimension, which are its norms' and
# biases. No format quantises these: rounded to bfloat16 they are the same numbers in a checkpoint of any dtype and in a
# GGUF file of any number of bits. Further training changes them. Adapters that are merged into matrices do not, and
# then the file may guess worse; the text is the model's own in any case.

FOLDER = Path(__file__).resolve().parents[1] / "shipped"

SHIPPED = {"smollm2-135m-instruct": "824cf4dfddc66fb5"}
"""The :func:`print_of_vectors` of a model, which its file has too, by the file's name."""


def shipped_file(model: PreTrainedModel) -> tuple[Path, str] | None:
    """The file that was learned of a model and comes with this package, and the fingerprint in it; else ``None``."""
    own = print_of_vectors(model)
    return next(((FOLDER / f"{name}.safetensors", own) for name, print_ in SHIPPED.items() if print_ == own), None)


def print_of_vectors(model: nn.Module) -> str | None:
    """64 bits of a model's weights of one dimension as hexadecimal digits.

    ``None`` where one is not a plain tensor of floats: sharded, quantised, not loaded.
    """
    content = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() != 1:
            continue
        plain = type(parameter) is nn.Parameter and type(parameter.data) is Tensor and not parameter.is_meta
        if not plain or not parameter.is_floating_point():
            return None
        rounded = parameter.detach().to(device="cpu", dtype=torch.bfloat16).contiguous()
        content.update(name.encode() + rounded.view(torch.int16).numpy().tobytes())
    return content.hexdigest()[:16]


# The weights with which the history's mixture begins, in the order of gsd_kernels.ops.history.records. Fitted as
# gsd_kernels.learn fits its own, from zero: to 7,888 nodes that SmolLM2 accepted in its greedy answers to 72 prompts,
# of which the benchmarks report none (of a recipe in commit a2049d6), with a table of the other half's answers and
# without.


@cache
def _weights() -> list[float]:
    parts = json.loads(FOLDER.with_name("prior.json").read_text(encoding="utf-8"))
    return [weight for part in parts.values() for weight in part]


def prior() -> Tensor:
    """The weights in the form that the op takes, float64."""
    return torch.tensor(_weights(), dtype=torch.float64, device="cpu")
