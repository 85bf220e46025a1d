"""csrc/algorithms/learn.h, on the CPU or the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .records import Asked, Mixture, Reliability


def learn_source(
    asked: Sequence[Asked],
    nodes: Tensor,
    picked: Tensor,
    mixture: Mixture,
    reliability: Reliability | None,
    prior_count: float,
    memory: float,
) -> None:
    nothing = nodes.new_empty(0)
    lists = [[nothing if t is None else t.contiguous() for t in part] for part in zip(*asked, strict=True)]
    tables = (None,) * 4 if reliability is None else reliability
    torch.ops.gsd_kernels.learn_source(
        nodes.contiguous(), picked.contiguous(), *lists, *mixture, *tables, prior_count, memory
    )
