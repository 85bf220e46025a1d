"""Causal convolutions over a few tokens, channel by channel, of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from ...records import last_rows
from ..elementwise import as_rows, plain
from .tree import RowTree


class ShortConvolution:
    """transformers' ``causal_conv1d_fn`` over rows: a row reads its nearest ancestors, then the end of the text.

    Sums run from the oldest token to the row, in float32 at least.

    Attributes:
        last: [B, W − 1, C], inputs at the end of the text; ``None``: not known before the first row.
        rows: [B, W − 1 + T, C], those and, behind them, the rows' since.
        used: whether the module has this convolution.
    """

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self.rows: Tensor | None = None
        self.used = False

    def begin(self, state: Tensor | None) -> None:
        """Go on behind a prompt, of which ``state`` [B, C, W] holds the last inputs."""
        self.last = None if state is None else state[..., 1:].transpose(1, 2)

    def end(self) -> Tensor | None:
        """The state at the end of the text, [B, C, W]; its first token is not read any more."""
        if self.last is None:
            return None
        return torch.nn.functional.pad(self.last, (0, 0, 1, 0)).transpose(1, 2).contiguous()

    def __call__(
        self,
        tree: RowTree,
        hidden_states: Tensor,  # [B, C, R]
        weight: Tensor,  # [C, W]
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        """Rows [B, C, R], through the activation."""
        inputs, width = hidden_states.transpose(1, 2).to(weight.dtype), weight.shape[1]
        if self.last is None:
            self.last = inputs.new_zeros(inputs.shape[0], width - 1, inputs.shape[2])
        self.used, self.before = True, tree.before(width)
        before = self.rows if tree.first and self.rows is not None else self.last
        earlier = before[:, : width - 1 + tree.first].to(inputs)
        self.rows = torch.cat([earlier, inputs], 1)
        exact = torch.promote_types(inputs.dtype, torch.float32)
        weight, out = weight.to(exact), None
        for back in range(width - 1, -1, -1):
            there = self.before[:, tree.first :, back, None].expand(-1, -1, inputs.shape[2])
            term = self.rows.gather(1, there).to(exact) * weight[:, width - 1 - back]
            out = term if out is None else out + term
        assert out is not None
        if bias is not None:
            out = out + bias.to(exact)
        out = out.to(inputs.dtype)
        if activation is not None:
            out = plain(ACT2FN[activation](as_rows(out)))
        return out.to(hidden_states.dtype).transpose(1, 2)

    def commit(self, accepted_rows: Tensor, num_accepted: Tensor) -> None:
        """See :class:`~.mixers.Form`."""
        if self.rows is None or self.last is None:
            return
        device = self.rows.device
        count = num_accepted.to(device)
        row = last_rows(accepted_rows.to(device), count)[:, None]  # [B, 1]
        width = self.before.shape[2]
        path = self.before.gather(1, row[..., None].expand(-1, -1, width))[:, 0, : width - 1].flip(1)  # [B, W − 1]
        new = self.rows.gather(1, path[..., None].expand(-1, -1, self.rows.shape[2]))
        self.last = torch.where((count == 0)[:, None, None], self.last, new)
        self.rows = None

    @property
    def nbytes(self) -> int:
        """Bytes of inputs."""
        return sum(t.nbytes for t in (self.last, self.rows) if t is not None)
