"""Texts that cross the border between two sets of rotary frequencies, see :mod:`~gsd_kernels_hf.model.sides`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .session import Session


def cross(session: Session, lengths: Sequence[int], done: Sequence[bool]) -> bool:
    """Read texts anew that crossed the border since the last step, where transformers does.

    Args:
        session: begun on the texts.
        lengths: of the sequences, padding included.
        done: which of them ended.

    Returns:
        Whether the next step must be plain: its rows would lie on both sides.
    """
    sides = session.target.sides
    if sides is None or not sides.pending:
        return False
    longest, mask = max(lengths), session.request.attention_mask
    lengths = [longest] * len(lengths) if session.key.padding else lengths
    crossed = [length > sides.original for length in lengths]
    if any(long and column for long, column in zip(crossed, sides.columns, strict=True)):
        if mask is not None:
            mask = nn.functional.pad(mask, (0, longest - 1 - mask.shape[1]), value=1)
        with session.reading():
            session.target.cross(crossed, session.state.tokens[:, : longest - 1], mask)
    before = [n for n, long, end in zip(lengths, crossed, done, strict=True) if not long and not end]
    sides.pending = bool(before)
    return any(length + session.key.width > sides.original for length in before)
