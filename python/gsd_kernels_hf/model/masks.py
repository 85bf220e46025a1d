"""How far back the rows of a model see, by the function that transformers made an attention mask of."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

FAR = 1 << 20  # no window reaches further


class Unserved(Exception):
    """Graph rows cannot be verified in a model; the message completes a sentence that begins with its class."""


class Limits(NamedTuple):
    """The limits of the sight of rows that see no later position; without either, they see all positions before."""

    window: int | None = None  # positions that a row sees, its own included
    chunk: int | None = None  # positions of a chunk, of which a row sees its own alone; counted from the text's begin

    def seen(self, row: Tensor, position: Tensor) -> Tensor:
        """Return whether rows at positions ``row`` of a text see ``position``."""
        visible = (position <= row) & (position >= 0)
        if self.window is not None:
            visible &= row - position < self.window
        if self.chunk is not None:
            visible &= row // self.chunk == position // self.chunk
        return visible

    @property
    def most(self) -> int | None:
        """Positions that a row sees at most."""
        return self.chunk if self.window is None else self.window


def limits_of_mask(
    mask: Any, call_window: int | None, made: list[tuple[Any, dict[str, Any]]], padding: Sequence[int]
) -> Limits:
    """The limits of the mask that arrived, which the model's mask function must have made.

    Where it is a copy, on another device for instance, that could be of several, ``call_window`` decides.

    Args:
        mask: as it arrived.
        call_window: the window that the attention call names.
        made: masks and what they were made of.
        padding: of every sequence.
    """
    origins = [arguments for own, arguments in made if mask is own and own is not None]
    origins = origins or [arguments for own, arguments in made if _is_view(mask, own)]
    origins = origins or [arguments for own, arguments in made if _equal(mask, own)]
    if not origins:
        raise Unserved("makes an attention mask of its own, which graph rows cannot follow")
    if any(arguments.get("attention_mask") is None for arguments in origins):
        raise Unserved("leaves padding out of its attention mask")
    limits = {limits_of(arguments.get("mask_function", causal_mask_function), padding) for arguments in origins}
    if len(limits) > 1:
        limits = {one for one in limits if one.window == call_window}
    if len(limits) != 1:
        raise Unserved("has attention masks that cannot be told apart")
    return limits.pop()


def _is_view(mask: Any, own: Any) -> bool:
    if not isinstance(mask, Tensor) or not isinstance(own, Tensor):
        return False
    try:
        same = mask.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
    except RuntimeError:  # a wrapper of tensors has no storage
        return False
    return same and mask.dtype == own.dtype and mask.shape == own.shape


def _equal(mask: Any, own: Any) -> bool:
    """Return whether ``mask`` is a copy of ``own``."""
    if not isinstance(mask, Tensor) or not isinstance(own, Tensor) or mask.dtype != own.dtype:
        return False
    return mask.shape == own.shape and bool((mask == own.to(mask.device)).all())


def limits_of(mask_function: Callable[..., Tensor], padding: Sequence[int] = (0,)) -> Limits:
    """Find what limits a mask function (b, h, q, k) → bool of columns, for sequences behind ``padding``.

    Raises:
        Unserved: the function is not that of a causal mask, with or without a window or chunks.
    """

    def sees(sequence: int, row: Tensor, back: Tensor) -> Tensor:
        zero, column = torch.zeros_like(row), row + padding[sequence]
        seen = mask_function(zero + sequence, zero, column, column - back)
        return torch.as_tensor(seen, dtype=torch.bool, device=row.device).expand_as(row)

    def blind(row: int, back: int) -> bool:
        return not sees(0, *torch.tensor([[row], [back]], dtype=torch.int64, device="cpu"))

    try:
        # The first row that does not see the text's first token; a chunk's does not see its predecessor either.
        first = 1 + bisect_left(range(1, FAR), True, key=lambda row: blind(row, row))
        limits = Limits() if first == FAR else Limits(chunk=first) if first > 1 and blind(first, 1) else Limits(first)
        edge = limits.most or 4096
        few = {0, 1, 2, 7, 100, edge - 1, edge, edge + 1, 2 * edge - 1, 2 * edge, 3 * edge + 1, FAR}
        back = {-1, -2, -100, 0, 1, 2, 3, 7, *(1 << i for i in range(20)), edge - 1, edge, edge + 1}
        row, distance = torch.meshgrid(
            torch.tensor(sorted(few), dtype=torch.int64, device="cpu"),
            torch.tensor(sorted(back), dtype=torch.int64, device="cpu"),
            indexing="ij",
        )
        row, distance = row[distance <= row], distance[distance <= row]
        expected = limits.seen(row, row - distance)
        exact = all(bool((sees(sequence, row, distance) == expected).all()) for sequence in range(len(padding)))
    except Exception as error:
        raise Unserved(f"has an attention mask that depends on more than positions ({type(error).__name__})") from error
    if not exact:
        raise Unserved("has attention that is neither causal nor causal within a sliding window or chunks")
    return limits
