"""The history that one call leaves to the next: a table of its own, which can be saved."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from gsd_kernels import NgramTable
from gsd_kernels.ops.ngram.reference import sets_of

from ..files import damaged, number_in, open_saved, path_of, write_file
from ..locks import forkable_lock

FORMAT = "gsd_kernels history"
VERSION = 1


@dataclass(frozen=True)
class KeptTable:
    """One sequence's table, whose tensors are never written again."""

    keys: Tensor  # int64 [capacity]
    tokens: Tensor  # int32 [capacity, K]
    log_probs: Tensor  # float32 [capacity, K]
    max_context: int
    ways: int

    @classmethod
    def of(cls, table: NgramTable, row: int) -> KeptTable:
        return cls(table.keys[row], table.tokens[row], table.log_probs[row], table.max_context, table.ways)

    def copy(self) -> KeptTable:
        return replace(self, keys=self.keys.clone(), tokens=self.tokens.clone(), log_probs=self.log_probs.clone())

    def fits(self, table: NgramTable) -> bool:
        """Return whether the table has the same sets."""
        mine = (len(self.keys), self.max_context, self.ways)
        return mine == (table.keys.shape[1], table.max_context, table.ways)

    def before(self, older: KeptTable) -> KeptTable:
        """Both tables in one: a set's entries, then those of the older table's set, as far as there is room."""
        width = max(self.tokens.shape[1], older.tokens.shape[1])
        device, sets = self.keys.device, (-1, self.ways)
        ours, theirs = self.keys.view(sets), older.keys.to(device).view(sets)
        again = (theirs[:, :, None] == ours[:, None, :]).any(2)
        keys = torch.cat([ours, torch.where(again, 0, theirs)], 1)
        kept = (keys == 0).to(torch.uint8).sort(dim=1, stable=True).indices[:, : self.ways]  # [sets, ways]

        def both(mine: Tensor, other: Tensor, nothing: float) -> Tensor:
            given = [mine, other.to(device)]
            parts = [torch.nn.functional.pad(t, (0, width - t.shape[1]), value=nothing) for t in given]
            whole = torch.cat([t.view(-1, self.ways, width) for t in parts], 1)
            return whole.gather(1, kept[..., None].expand(-1, -1, width)).flatten(0, 1)

        tokens = both(self.tokens, older.tokens, -1)
        log_probs = both(self.log_probs, older.log_probs, 0.0)
        return KeptTable(keys.gather(1, kept).flatten(), tokens, log_probs, self.max_context, self.ways)


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
        self._kept: KeptTable | None = None
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

    def add(self, table: NgramTable, began: KeptTable | None) -> KeptTable | None:
        """Take over what a call's table holds, of all its sequences.

        Args:
            table: of the call.
            began: what it holds in any case, as far as it has room: what :meth:`restore` or ``add`` returned.

        Returns:
            What it holds in any case from here on, of all that is remembered now.
        """
        newest = KeptTable.of(table, 0).copy()  # the call's table goes on being written
        for row in range(1, table.keys.shape[0]):
            newest = newest.before(KeptTable.of(table, row))
        with self._lock:
            older = self._kept
            if older is not None and older is not began and older.fits(table):  # other calls ended meanwhile
                self._kept = newest.before(older)
                return began
            self._kept = newest
        return newest

    def restore(self, table: NgramTable) -> KeptTable | None:
        """Write what is remembered into every sequence of an empty table, in place; return it."""
        kept = self._kept
        if kept is None or not kept.fits(table):
            return None
        width = min(table.tokens.shape[2], kept.tokens.shape[1])
        table.keys.copy_(kept.keys)
        table.tokens[..., :width] = kept.tokens[:, :width].to(table.tokens.device)
        table.log_probs[..., :width] = kept.log_probs[:, :width].to(table.tokens.device)
        return kept

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write what is remembered to a safetensors file, as a whole or not at all.

        Raises:
            ValueError: nothing is remembered yet.
        """
        kept = self._kept
        if kept is None:
            raise ValueError("history: nothing is remembered yet; generate with the history as a source first")
        tensors = {"keys": kept.keys, "tokens": kept.tokens, "log_probs": kept.log_probs}
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        numbers = {"max_context": kept.max_context, "ways": kept.ways, "vocab_size": self.vocab_size}
        about = {"format": FORMAT, "version": str(VERSION), **{name: str(value) for name, value in numbers.items()}}
        write_file(path_of(file), lambda partial: save_file(tensors, partial, metadata=about))

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


def _read(file: Path, vocab_size: int) -> KeptTable:
    foreign = "is no saved history; handle.history.save writes one"
    with open_saved(file, "history", FORMAT, VERSION, foreign=foreign) as (opened, about):
        sizes = {name: number_in(about, name) for name in ("max_context", "ways", "vocab_size")}
        # Copies: pages of a mapped file that is shortened later end the process.
        keys, tokens, log_probs = (opened.get_tensor(name).clone() for name in ("keys", "tokens", "log_probs"))
    if sizes["vocab_size"] != vocab_size:
        raise ValueError(
            f"history: {file} is of a vocabulary of {sizes['vocab_size']} tokens, the target has {vocab_size}; load "
            "what was saved for this target"
        )
    kept = KeptTable(keys, tokens, log_probs, sizes["max_context"], sizes["ways"])
    if not _whole(kept, vocab_size):
        raise damaged("history", file, "its table is none")
    return kept


def _whole(kept: KeptTable, vocab_size: int) -> bool:
    """Return whether this is a table as the ops leave them: they rely on its order."""
    ours = NgramTable.empty(1, 1, "cpu")
    if kept.keys.dtype != torch.int64 or not (kept.keys.dim() == 1 and kept.fits(ours)):
        return False
    dtypes = (kept.tokens.dtype, kept.log_probs.dtype)
    if kept.tokens.dim() != 2 or dtypes != (torch.int32, torch.float32):
        return False
    shape = (len(kept.keys), kept.tokens.shape[1])
    if kept.tokens.shape != shape or kept.log_probs.shape != shape:
        return False
    keys = kept.keys.view(-1, kept.ways)
    free = keys == 0
    own = torch.arange(len(keys), device=keys.device)[:, None] == sets_of(keys, len(keys))
    twins = (keys[:, :, None] == keys[:, None, :]).sum(2) > 1
    ordered = (free[:, 1:] | ~free[:, :-1]).all() and (own | free).all() and not (twins & ~free).any()
    inside = (kept.tokens >= -1).all() and (kept.tokens < vocab_size).all()
    return bool(ordered and inside and (kept.log_probs <= 1e-3).all())
