"""How many cache positions a text has: what its next steps need, not what it may become."""

from __future__ import annotations

import torch

from ..model import replay

GRAIN_TOKENS = 256
"""Positions by which storage is sized."""

FIRST_TOKENS, FIRST_GPU_TOKENS = 256, 1024
"""New tokens that a text has room for at first: on a GPU growing means capturing anew."""

GROWTH = 1.5
"""At most so much larger does storage become at once; what is copied in all is three texts at most."""


def rounded(positions: int) -> int:
    """A multiple of :data:`GRAIN_TOKENS`."""
    return -(-positions // GRAIN_TOKENS) * GRAIN_TOKENS


def to_begin(prompt: int, slots: int, room: int, device: torch.device) -> int:
    """Positions for a ``prompt`` and its first new tokens, of which there are ``room`` at most, and for a step."""
    first = FIRST_GPU_TOKENS if replay.is_gpu(device) else FIRST_TOKENS
    return min(prompt + room + slots, rounded(prompt + first + slots))


def larger(capacity: int, needed: int, most: int) -> int:
    """Positions to grow to from ``capacity``: what is ``needed``, and some ahead up to ``most``."""
    return max(needed, min(most, rounded(max(needed, int(GROWTH * capacity)))))
