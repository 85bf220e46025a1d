"""Rows as a tree: which row each one follows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gsd_kernels.graph import unpack_bits


@dataclass(eq=False)
class RowTree:
    """R rows behind the stored text of each of B sequences.

    Attributes:
        parents: int64 [B, R], the row that a row follows; −1: the stored text.
        depths: int64 [B, R], rows before it on its path.
    """

    parents: Tensor
    depths: Tensor

    @classmethod
    def of(cls, ancestor_mask: Tensor, count: int) -> RowTree:
        """From ancestor bits int32 [B, R, ⌈R/32⌉] of ``count`` rows; a row's own bit need not be set."""
        rows = torch.arange(count, device=ancestor_mask.device)
        before = unpack_bits(ancestor_mask, count) & (rows != rows[:, None])  # [B, R, R]
        depths = before.sum(-1)
        # Of the rows on a path the deepest is the last.
        last = torch.where(before, depths[:, None, :] + 1, 0).max(-1)
        return cls(torch.where(last.values > 0, last.indices, -1), depths)

    @classmethod
    def apart(cls, batch: int, count: int, device: torch.device) -> RowTree:
        """Rows none of which follows another."""
        parents = torch.full((batch, count), -1, dtype=torch.int64, device=device)
        return cls(parents, torch.zeros_like(parents))

    def shallow(self, deepest: int) -> RowTree:
        """With rows that are deeper apart from all others: no path that can be accepted holds one."""
        deep = self.depths > deepest
        return RowTree(torch.where(deep, -1, self.parents), torch.where(deep, 0, self.depths))

    @cached_property
    def narrow(self) -> tuple[Tensor, Tensor]:
        """Parents and depths, int32 [B, R]."""
        return self.parents.to(torch.int32), self.depths.to(torch.int32)

    def before(self, width: int) -> Tensor:
        """Each row and the ``width`` − 1 tokens before it, nearest first: int64 [B, R, width].

        They index the last ``width`` − 1 tokens of the text, followed by the rows.
        """
        if width not in self._before:
            batch, count = self.parents.shape
            text = torch.arange(-1, width - 2, device=self.parents.device).expand(batch, -1)
            follows = torch.where(self.parents < 0, width - 2, self.parents + width - 1)
            follows = torch.cat([text, follows], 1)  # [B, width − 1 + R]; what each one follows
            found = [torch.arange(width - 1, width - 1 + count, device=text.device).expand(batch, -1)]
            for _ in range(width - 1):
                found.append(follows.gather(1, found[-1]))
            self._before[width] = torch.stack(found, -1)
        return self._before[width]

    @cached_property
    def _before(self) -> dict[int, Tensor]:
        return {}

    @cached_property
    def levels(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """By depth: sequence, row and parent of its rows, int64 [n] each (waits for the device)."""
        found = []
        for depth in range(int(self.depths.max()) + 1):
            sequence, row = (self.depths == depth).nonzero(as_tuple=True)
            found.append((sequence, row, self.parents[sequence, row]))
        return found

    def on(self, device: torch.device) -> RowTree:
        """The same on another device, copied once for all layers there."""
        if self.parents.device == device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = RowTree(self.parents.to(device), self.depths.to(device))
        return self._elsewhere[device]

    @cached_property
    def _elsewhere(self) -> dict[torch.device, RowTree]:
        return {}
