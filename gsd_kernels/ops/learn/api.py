from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..table import small_op
from . import reference
from .records import Asked, Mixture

MAX_LEVELS = 64
"""That the compiled op takes; more are joined."""


def tables(asked: Sequence[Asked], nodes: Tensor, picked: Tensor, mixture: Mixture, *rest: Any) -> tuple[Any, ...]:
    """The operator's list, a field of all levels behind the other, and its tables."""
    if not asked:
        raise ValueError("asked: expected at least one level")
    nothing, levels = nodes.new_empty(0), _joined(asked) if len(asked) > MAX_LEVELS else asked
    tensors = [nothing if t is None else t.contiguous() for part in zip(*levels, strict=True) for t in part]
    return (nodes, picked, tensors, *mixture, *rest)


learn_source = small_op(
    "learn_source",
    "nodes[B,P] picked[B,P] asked{ ... } start:float32[E] shares!:float32[E] counts!:float32[E] weights!:float32[E] "
    "prior_count:float=c memory:float=m",
    reference.learn_source,
    flat=tables,
    tolerance=1e-5,
)


def _joined(asked: Sequence[Asked]) -> list[Asked]:
    """The levels side by side as one."""
    indexed = [one._replace(index=torch.zeros_like(one.node_ids) if one.index is None else one.index) for one in asked]
    return [Asked(*(torch.cat(part, 1) for part in zip(*indexed, strict=True)))]
