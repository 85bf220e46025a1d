"""Padding as rows: where logits processors see the whole batch, they are shown what follows a text that ended, too."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gsd_kernels import Acceptance, Rows
from gsd_kernels.graph import pack_bits

from ..records import DecodeState


def padded(rows: Rows, state: DecodeState, kv_len: Tensor) -> Rows:
    """The rows that are forwarded where padding is: of a finished sequence, what its text has behind ``kv_len`` [B].

    All on the device. There is nothing to learn from such rows, so none counts in ``num_rows``.
    """
    count, device = rows.token_ids.shape[1], rows.token_ids.device
    place = torch.arange(count, dtype=torch.int32, device=device)  # [R]
    behind = (kv_len[:, None].long() + place).clamp(max=state.tokens.shape[1] - 1)  # [B, R]
    done = state.done[:, None]  # [B, 1]
    return replace(
        rows,
        token_ids=torch.where(done, state.tokens.gather(1, behind).to(torch.int32), rows.token_ids),
        parent_rows=torch.where(done, place - 1, rows.parent_rows),
        depths=torch.where(done, place, rows.depths),
        ancestor_mask=torch.where(done[..., None], pack_bits(place <= place[:, None]), rows.ancestor_mask),
        num_rows=torch.where(state.done, 0, rows.num_rows),
    )


def padded_path(accepted: Acceptance, done: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [B, P] whose keys and values stay, and their number [B]: of sequences that are ``done``, as much padding."""
    count = torch.where(done, accepted.num_accepted.max(), accepted.num_accepted)  # [B]
    place = torch.arange(accepted.accepted_rows.shape[1], dtype=torch.int32, device=done.device)  # [P]
    chain = torch.where(place < count[:, None], place, -1)  # [B, P]
    return torch.where(done[:, None], chain, accepted.accepted_rows), count
