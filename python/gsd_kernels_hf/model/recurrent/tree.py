"""Rows as a tree: which row each one follows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from gsd_kernels.graph import unpack_bits


@dataclass(eq=False)
class RowTree:
    """T rows behind the stored text of each of B sequences, the last R of which are forwarded now.

    Attributes:
        parents: int64 [B, T], the row that a row follows; −1: the stored text.
        depths: int64 [B, T], rows before it on its path.
        first: T − R, rows that were forwarded before, since a path was stored.
    """

    parents: Tensor
    depths: Tensor
    first: int = 0

    @classmethod
    def of(
        cls,
        ancestor_mask: Tensor,
        count: int,
        *,
        slots: Tensor | None = None,
        earlier: RowTree | None = None,
        stem: int = 0,
    ) -> RowTree:
        """From what ``count`` rows see.

        Args:
            ancestor_mask: int32 [B, R, words], bits of slots; a row's own need not be set.
            count: R.
            slots: int64 [B, R], of the rows; ``None``: one after the other, behind those of ``earlier``.
            earlier: rows that these may follow.
            stem: how many of those have no slot: a path that all others follow.
        """
        first = 0 if earlier is None else earlier.parents.shape[1]
        sees = unpack_bits(ancestor_mask, first - stem + count)
        if slots is not None:
            sees = sees.gather(2, slots[:, None].expand(-1, count, -1))
        sees = pad(sees, (stem, 0), value=True)
        rows = torch.arange(first + count, device=ancestor_mask.device)
        before = sees & (rows != rows[first:, None])  # [B, R, T]
        depths = before.sum(-1)
        if earlier is not None:
            depths = torch.cat([earlier.depths, depths], 1)
        # Of the rows on a path the deepest is the last.
        last = torch.where(before, depths[:, None, :] + 1, 0).max(-1)
        parents = torch.where(last.values > 0, last.indices, -1)
        return cls(parents if earlier is None else torch.cat([earlier.parents, parents], 1), depths, first)

    @classmethod
    def apart(cls, batch: int, count: int, device: torch.device) -> RowTree:
        """Rows none of which follows another."""
        parents = torch.full((batch, count), -1, dtype=torch.int64, device=device)
        return cls(parents, torch.zeros_like(parents))

    def shallow(self, deepest: int) -> RowTree:
        """With rows that are deeper apart from all others: no path that can be accepted holds one."""
        deep = self.depths > deepest
        return RowTree(torch.where(deep, -1, self.parents), torch.where(deep, 0, self.depths), self.first)

    def until(self, count: int) -> RowTree | None:
        """Its first rows; ``None`` for none."""
        return RowTree(self.parents[:, :count], self.depths[:, :count]) if count else None

    @cached_property
    def narrow(self) -> tuple[Tensor, Tensor]:
        """Parents and depths, int32 [B, T]."""
        return self.parents.to(torch.int32), self.depths.to(torch.int32)

    def before(self, width: int) -> Tensor:
        """Each row and the ``width`` − 1 tokens before it, nearest first: int64 [B, T, width].

        They index the last ``width`` − 1 tokens of the text, followed by the rows.
        """
        if width not in self._before:
            batch, count = self.parents.shape
            text = torch.arange(-1, width - 2, device=self.parents.device).expand(batch, -1)
            follows = torch.where(self.parents < 0, width - 2, self.parents + width - 1)
            follows = torch.cat([text, follows], 1)  # [B, width − 1 + T]; what each one follows
            rows = [torch.arange(width - 1, width - 1 + count, device=text.device).expand(batch, -1)]
            for _ in range(width - 1):
                rows.append(follows.gather(1, rows[-1]))
            self._before[width] = torch.stack(rows, -1)
        return self._before[width]

    @cached_property
    def _before(self) -> dict[int, Tensor]:
        return {}

    @cached_property
    def levels(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The rows that are forwarded now, so that each is behind its parent: sequence, row of R and parent of T,
        int64 [n] each (waits for the device)."""
        parents, levels = self.parents[:, self.first :], []
        waiting, ready = torch.ones_like(parents, dtype=torch.bool), parents < self.first
        while bool(ready.any()):
            sequence, row = ready.nonzero(as_tuple=True)
            levels.append((sequence, row, parents[sequence, row]))
            waiting &= ~ready
            ready = waiting & ~waiting.gather(1, (parents - self.first).clamp(min=0))
        return levels

    def on(self, device: torch.device) -> RowTree:
        """The same on another device, copied once for all layers there."""
        if self.parents.device == device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = RowTree(self.parents.to(device), self.depths.to(device), self.first)
        return self._elsewhere[device]

    @cached_property
    def _elsewhere(self) -> dict[torch.device, RowTree]:
        return {}
