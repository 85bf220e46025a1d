"""Cost of one decode step's graph ops beside the target's forward: merge × depth + flatten + verify + commit.

The target has a named shape and random weights (the time does not depend on them), one row a forward, a 256-token
prefix in its cache: what an ordinary decoding step costs. The graph is drafted from random candidates and verified
against picks that agree with most of them. Every op is compared with its reference before it is timed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from gsd_kernels import Acceptance, GraphConfig, Rows
from gsd_kernels.backends import unavailable_reason
from gsd_kernels_hf.model.gpu_proof import row_inputs
from gsd_kernels_hf.model.runner import RowModel

from ..lib.environment import environment
from ..lib.shapes import shape_named
from ..lib.timing import time_call
from .commit import PREFIX, commit_op, random_caches
from .merge import Step
from .rows import random_model

GRAPH = GraphConfig(depth=6, width=8, branch=4, max_rows=64, merge_context=1)


def agreeing(rows: Rows) -> Tensor:
    """Picks of the target, int32 [B, R], that accept the deepest path."""
    picks = torch.zeros_like(rows.token_ids)
    at = rows.depths.argmax(1, keepdim=True)  # [B, 1]
    for _ in range(int(rows.depths.max())):
        parents = rows.parent_rows.gather(1, at).clamp(min=0).long()
        pick = torch.where(at > 0, rows.token_ids.gather(1, at), picks.gather(1, parents))
        picks.scatter_(1, parents, pick)
        at = parents
    return picks


@torch.inference_mode()
def run(shape: str, device: torch.device, dtype: torch.dtype, batch: int = 1) -> dict[str, Any]:
    """The row of the benchmark.

    Raises:
        ValueError: no such shape.
        RuntimeError: an op is wrong.
    """
    step = Step(GRAPH, device, batch)
    step.merge("reference")
    rows = step.flatten("reference")
    step.picks = agreeing(rows)
    accepted = Acceptance(*step.verify(rows, "reference"))
    gen = torch.Generator().manual_seed(0)
    caches = random_caches(shape_named(shape), device, dtype, gen, GRAPH.cache_slots, batch)
    ops = {op.op.name: op for op in step.ops()}
    ops["commit"] = commit_op(caches, accepted.accepted_rows, accepted.num_accepted)
    for op in ops.values():
        op.check((op.checked or op.call)("auto"))
    model = random_model(shape, dtype, device)
    forwards = RowModel(model, PREFIX + 1, torch.zeros(1, dtype=torch.int32, device=device), "auto")
    inputs = row_inputs(1, PREFIX, device)
    parts = {name: vars(time_call(partial(op.call, "auto"), device)) for name, op in ops.items()}
    forward = time_call(lambda: forwards.rows(*inputs, keep=1), device)
    whole = sum(part["median"] for part in parts.values())
    return {
        "benchmark": "step_overhead",
        "environment": environment(device),
        "backend": "reference" if unavailable_reason(device.type, device) else device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": shape,
        "batch": batch,
        "rows": GRAPH.max_rows,
        "levels": GRAPH.depth,
        "accepted": accepted.num_accepted.tolist(),
        "parts": parts,
        "graph_ops_seconds": whole,
        "target_forward": vars(forward),
        "fraction": whole / forward.median,
    }
