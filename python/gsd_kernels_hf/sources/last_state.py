"""The target's hidden state that its output matrix read for the root: what heads and assistants draft from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..model.hidden import LAST
from ..packed.modules import device_of_weights, dtype_of
from ..records import Verified
from .base import DraftSource, Text, rows_at


class LastState(DraftSource):
    """A draft source that reads one hidden state a step.

    Attributes:
        hidden: [B, D], on the device of the target's output matrix, in its dtype.
        known: bool [B], whether there is one; not before the target has read a token.
    """

    hidden_layers = (LAST,)

    def start(self, text: Text, size: int) -> None:
        """Make the storage of a session, for states of this size."""
        self.state, head = text.state, text.target.stepping.get_output_embeddings()
        batch = self.state.tokens.shape[0]
        self.hidden = torch.zeros(batch, size, dtype=dtype_of(head), device=device_of_weights(head))
        self.known = torch.zeros(batch, dtype=torch.bool, device=self.state.tokens.device)

    def restart(self) -> None:
        self.known.zero_()

    def read(self, hidden: Mapping[int, Tensor], begin: int) -> None:
        """Keep the hidden state of the prompt's last position but one, which the root follows."""
        if LAST in hidden:  # not of every piece
            self.hidden.copy_(hidden[LAST][:, -1])
            self.known.copy_(self.state.kv_start < self.state.out_len - 1)

    def observe(self, verified: Verified) -> None:
        """Keep the hidden state of the row whose pick is the next root."""
        hidden = verified.hidden[LAST]
        last = rows_at(hidden, verified.last_rows()[:, None])[:, 0]
        running = verified.accepted.num_accepted > 0
        self.hidden.copy_(torch.where(running.to(hidden.device)[:, None], last, self.hidden))
        self.known.logical_or_(running)
