"""The history that one call leaves to the next: a table of its own, which can be saved."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor

from gsd_kernels import NgramTable

from ..files import path_of
from ..locks import forkable_lock
from ..store import read_saved, write_saved

FORMAT = "gsd_kernels history"
VERSION = 1
TENSORS = ("keys", "tokens", "log_probs")


def each(table: NgramTable, change: Callable[[Tensor], Tensor]) -> NgramTable:
    """A table whose tensors are changed alike."""
    parts = {name: change(getattr(table, name)) for name in TENSORS}
    return replace(table, **parts)


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
        given = [mine, other.to(device)]
        parts = [torch.nn.functional.pad(t, (0, width - t.shape[2]), value=nothing) for t in given]
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
        rows = [each(table, itemgetter(slice(row, row + 1))) for row in range(table.keys.shape[0])]
        newest = each(rows[0], Tensor.clone)  # the call's table goes on being written
        for row in rows[1:]:
            newest = before(newest, row)
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
        width = min(table.tokens.shape[2], kept.tokens.shape[2])
        table.keys.copy_(kept.keys)
        table.tokens[..., :width] = kept.tokens[..., :width].to(table.tokens.device)
        table.log_probs[..., :width] = kept.log_probs[..., :width].to(table.tokens.device)
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
        write_saved(path_of(file), FORMAT, VERSION, tensors, **sizes)

    def load(self, file: str | os.PathLike[str]) -> None:
        """Remember what :meth:`save` wrote, instead of what is remembered now.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged, of a newer version, of another vocabulary, or something else. What was
                remembered is kept.
        """
        kept = _read(path_of(file), self.vocab_size)
        with self._lock:
            self._kept, self.era = kept, object()


def _read(file: Path, vocab_size: int) -> NgramTable:
    foreign = "is no saved history; handle.history.save writes one"
    tensors, about = read_saved(file, "history", FORMAT, VERSION, foreign=foreign)
    if about["vocab_size"] != str(vocab_size):
        raise ValueError(
            f"history: {file} is of a vocabulary of {about['vocab_size']} tokens, the target has {vocab_size}; load "
            "what was saved for this target"
        )
    parts = {name: tensors[name][None] for name in TENSORS}
    return NgramTable(**parts, max_context=int(about["max_context"]), ways=int(about["ways"]))
