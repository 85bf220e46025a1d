"""Cost of one decode step's graph ops beside the target's forward: merge × depth + flatten + verify + commit.

The target has a named shape and random weights (the time does not depend on them), one row a forward, a 256-token
prefix in its cache: what an ordinary decoding step costs. The graph is drafted from random candidates and verified
against picks that agree with most of them. Every op is compared with its reference before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gsd_kernels import Acceptance, GraphConfig, Rows, commit_kv
from gsd_kernels.backends import unavailable_reason
from gsd_kernels_hf.model.runner import RowModel

from ..lib.environment import environment
from ..lib.shapes import shape_named
from ..lib.timing import time_call
from .merge import Step, different
from .rows import random_model, row_inputs

PREFIX = 256
GRAPH = GraphConfig(depth=6, width=8, branch=4, max_rows=64, merge_context=1)

Caches = list[list[Tensor]]
"""Keys, then values, [B, Hkv, S, D] a layer."""


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


def random_caches(shape: str, batch: int, device: torch.device, dtype: torch.dtype) -> Caches:
    """Of all layers, the prefix and as many rows as a step has."""
    sizes, gen = shape_named(shape), torch.Generator().manual_seed(0)
    size = (batch, sizes.num_key_value_heads, PREFIX + GRAPH.cache_slots, sizes.head_dim)
    source = torch.randn(size, generator=gen).to(device, dtype)
    return [[source.clone() for _ in range(sizes.num_layers)] for _ in range(2)]


def committed(caches: Caches, accepted: Acceptance, backend: str) -> tuple[Tensor, ...]:
    """The caches, and their length, once the accepted rows are kept."""
    kv_len = torch.full_like(accepted.num_accepted, PREFIX)
    commit_kv(*caches, accepted.accepted_rows, accepted.num_accepted, kv_len, backend=backend)
    return (kv_len, *caches[0], *caches[1])


def check(name: str, call: Callable[[str], tuple[Tensor, ...]]) -> None:
    """Nothing that is wrong is timed: these ops equal their references to the bit.

    Raises:
        RuntimeError: one does not.
    """
    right = tuple(t.clone() for t in call("reference"))
    if wrong := different(call("auto"), right):
        raise RuntimeError(f"step-overhead: {name} differs from its reference in {wrong:.0f} places")


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
    caches = random_caches(shape, batch, device, dtype)
    ops: dict[str, Callable[[str], tuple[Tensor, ...]]] = {
        "merge": step.merge,
        "flatten": lambda backend: step.flatten(backend).tensors(),
        "verify": lambda backend: step.verify(rows, backend),
    }
    for name, call in ops.items():
        check(name, call)
    check("commit", lambda backend: committed([[t.clone() for t in part] for part in caches], accepted, backend))
    ops["commit"] = lambda backend: committed(caches, accepted, backend)  # in place, so not the same twice

    model = random_model(shape, dtype, device)
    forwards = RowModel(model, PREFIX + 1, torch.zeros(1, dtype=torch.int32, device=device), "auto")
    inputs = row_inputs(1, PREFIX, device)
    parts = {name: vars(time_call(lambda call=call: call("auto"), device)) for name, call in ops.items()}
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
