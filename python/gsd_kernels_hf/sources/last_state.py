"""The target's hidden state that its output matrix read for the root: what heads and assistants draft from."""

from __future__ import annotations

import torch

from ..model.hidden import LAST
from ..packed.modules import device_of_weights, dtype_of, shape_of
from ..records import Verified
from .base import OwnSource, Prefilled, Text, rows_at


class LastState(OwnSource):
    """A draft source that reads one hidden state a step.

    Attributes:
        hidden: [B, D], on the device of the target's output matrix, in its dtype.
        known: bool [B], whether there is one; not before the target has read a token.
    """

    hidden_layers = (LAST,)

    def start(self, text: Text) -> None:
        """Make room for a state of each sequence."""
        head, batch = text.target.stepping.get_output_embeddings(), len(self.state.out_len)
        self.hidden = torch.zeros(batch, shape_of(head)[1], dtype=dtype_of(head), device=device_of_weights(head))
        self.known = torch.zeros(batch, dtype=torch.bool, device=self.state.tokens.device)

    def attach(self, text: Text) -> None:
        super().attach(text)
        self.known.zero_()

    def observe(self, seen: Verified | Prefilled) -> None:
        """Keep the hidden state that the next root follows: of the prompt's last position but one, or of a row."""
        if isinstance(seen, Prefilled):
            if LAST in seen.hidden:  # not of every piece
                self.hidden.copy_(seen.hidden[LAST][:, -1])
                self.known.copy_(self.state.kv_start < self.state.out_len - 1)
            return
        hidden = seen.hidden[LAST]
        last = rows_at(hidden, seen.last_rows()[:, None])[:, 0]
        running = seen.accepted.num_accepted > 0
        self.hidden.copy_(torch.where(running.to(hidden.device)[:, None], last, self.hidden))
        self.known.logical_or_(running)
