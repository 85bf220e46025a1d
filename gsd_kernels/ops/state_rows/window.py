from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
"""Tokens of a block: the state moves on at their boundaries alone."""
BLOCKS = 3
"""Of committed tokens: the block before the last boundary, the one after it, and what a step may append."""


@dataclass
class StateWindow:
    """All that one layer keeps of B texts: states at two boundaries of blocks, and what the tokens since put into them.

    H heads of values [V], G groups of keys [K] (head h has the keys of group h // (H / G)); D is 1, or K where every
    channel of a key decays by itself. Tokens count from where the window begins; token t lies at place
    t mod (BLOCKS · block), row r of a step at place BLOCKS · block + r.

    Attributes:
        state: float32 [2, B, H, K, V]; before block c, at c mod 2.
        keys: float32 [B, T, G, K].
        updates: float32 [B, T, H, V]; token t adds keys[t] ⊗ updates[t].
        sums: float32 [B, T, H, D]; logarithms of decays since the beginning of the token's block, its own included.
        block: tokens of a block.
    """

    state: Tensor
    keys: Tensor
    updates: Tensor
    sums: Tensor
    block: int = BLOCK

    @classmethod
    def empty(
        cls, batch: int, heads: int, groups: int, key: int, value: int, decays: int, device: torch.device, block: int
    ) -> StateWindow:
        """A window at the beginning of texts, without room for rows."""
        places = BLOCKS * block

        def new(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        return cls(
            state=new(2, batch, heads, key, value),
            keys=new(batch, places, groups, key),
            updates=new(batch, places, heads, value),
            sums=new(batch, places, heads, decays),
            block=block,
        )

    @property
    def places(self) -> int:
        """Places of committed tokens."""
        return BLOCKS * self.block

    def reserve(self, rows: int) -> None:
        """Make room for the rows of a step."""
        more = self.places + rows - self.keys.shape[1]
        if more > 0:
            for name in ("keys", "updates", "sums"):
                stored = getattr(self, name)
                new = stored.new_zeros(stored.shape[0], more, *stored.shape[2:])
                setattr(self, name, torch.cat([stored, new], 1))

    def end(self, lengths: Tensor) -> Tensor:
        """The states after ``lengths`` tokens, int32 [B]: float32 [B, H, K, V]."""
        out = []
        for b, length in enumerate(lengths.tolist()):
            begin = length // self.block * self.block
            out.append(self.folded(b, self.state[begin // self.block % 2, b], range(begin, length)))
        return torch.stack(out)

    def folded(self, b: int, state: Tensor, tokens: range) -> Tensor:
        """The state of sequence ``b`` [H, K, V] behind these tokens of a block, of which ``state`` is the beginning."""
        heads, groups = self.updates.shape[2], self.keys.shape[2]
        places = [token % self.places for token in tokens]
        if not places:
            return state
        last = self.sums[b, places[-1]]  # [H, D]
        state = state * last.exp()[..., None]
        for place in places:
            key = self.keys[b, place].repeat_interleave(heads // groups, 0)  # [H, K]
            decayed = key * (last - self.sums[b, place]).exp()
            state = state + decayed[..., None] * self.updates[b, place][:, None]
        return state
