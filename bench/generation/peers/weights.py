"""Conversions of weights for other engines: nothing that could be seen in an output."""

from __future__ import annotations

import torch
from torch import Tensor

_INVISIBLE = 2.0**-100  # vanishes beside any number that a residual stream holds, in float32 and bfloat16


@torch.no_grad()
def distinct(weight: Tensor, index: int) -> Tensor:
    """``weight``, or for a matrix of zeros one that equals no other layer's.

    An inflated target's added layers end in zeros. An engine that stores equal constants once would read one matrix
    from the cache for all of them, and not do the work of a model of this size.
    """
    if bool(weight.any()):
        return weight
    marked = weight.detach().clone()
    marked[0, index % weight.shape[1]] = _INVISIBLE
    return marked
