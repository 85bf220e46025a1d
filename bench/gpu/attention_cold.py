"""One layer's tree attention over keys and values that no cache holds: ours, and other people's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gsd_kernels.backends import unavailable_reason

from ..kernels import attention
from ..kernels.peers import ATTENTION as PEERS
from ..lib.cold import copies_for, time_rotating
from ..lib.runner import Contestant, Entry, Settings
from ..lib.shapes import shape_named
from ..lib.timing import copy_bandwidth, time_call
from .work import Work, points

SHAPES = ("llama-3-8b", "llama-2-70b")
PREFIXES = (1024, 4096, 32768)
ROWS = (16, 32, 64)


def run(work: Work) -> None:
    """Points ``SHAPE prefix=P rows=R CONTESTANT``; those that compile for minutes come last."""
    small = work.rehearse
    shapes, prefixes, rows = (("tiny",), (64,), (8,)) if small else (SHAPES, PREFIXES, ROWS)
    work.each(["bandwidth"], lambda _: {"copy": copy_bandwidth(work.device, quick=small)})
    ours = ("triton", "cuda")
    if small:
        own = unavailable_reason("cpu", work.device)
        ours = ("cpu" if own is None else "reference",)
        work.skip("backends triton and cuda, FlashInfer" + ("" if own is None else f"; nor cpu, {own}"))
    contestants = (*ours, *PEERS)
    names = points(
        "{shape} prefix={prefix} rows={rows} {who}", who=contestants, shape=shapes, prefix=prefixes, rows=rows
    )
    work.each(names, lambda name: measure(work, *names[name]))


@torch.no_grad()
def measure(work: Work, who: str, shape: str, prefix: int, rows: int) -> dict[str, Any]:
    """Time one contestant, after comparing what it computes with float32.

    Raises:
        RuntimeError: ours is wrong, or cannot run.
    """
    sizes = shape_named(shape)
    kept = 2 * sizes.num_key_value_heads * prefix * sizes.head_dim * work.dtype.itemsize
    settings = Settings(
        device=work.device,
        dtype=work.dtype,
        shapes=(shape,),
        rows=(rows,),
        prefixes=(prefix,),
        backends=[] if who in PEERS else [who],
        peers=[who] if who in PEERS else [],
        quick=work.rehearse,
    )
    first = next(attention.entries(settings))
    (contestant,) = first.contestants
    if contestant.call is None:
        if not contestant.peer and contestant.missing:
            raise RuntimeError(f"{who} cannot run: {contestant.missing}")
        return {"missing": contestant.missing}
    try:
        error = held(first, contestant.call)
        timing = _timed(work, settings, contestant, copies_for(kept, work.device))
    except Exception as failure:
        if not contestant.peer or isinstance(failure, torch.AcceleratorError):
            raise
        return {"missing": " ".join(f"{type(failure).__name__}: {failure}".split())[:300]}
    floor = first.bytes_moved / work.points["bandwidth"]["copy"] if work.is_done("bandwidth") else None
    print(f"  {timing['median'] * 1e6:.1f} µs", flush=True)
    return {**timing, "max_error": error, "bytes": first.bytes_moved, "floor_seconds": floor, "shape": vars(sizes)}


def held(entry: Entry, call: Callable[[], Any]) -> float:
    """The error of what is to be timed.

    Raises:
        RuntimeError: it is too large.
    """
    assert entry.error is not None
    error = entry.error(call())
    if not error <= entry.tolerance:
        raise RuntimeError(f"wrong result: error {error:.3g}, allowed {entry.tolerance:.3g}")
    return error


def _timed(work: Work, settings: Settings, contestant: Contestant, copies: int) -> dict[str, Any]:
    """Time on one copy what has to compile for its tensors, with the cache flushed before every call."""
    assert contestant.call is not None
    seconds = 0.02 if work.rehearse else 0.15
    if contestant.setup_seconds is not None:
        return {**vars(time_call(contestant.call, work.device, seconds=seconds)), "copies": 1}
    others = [next(attention.entries(settings)).contestants[0].call for _ in range(copies - 1)]
    calls = [contestant.call, *(call for call in others if call is not None)]
    return {**vars(time_rotating(calls, work.device, seconds=seconds)), "copies": len(calls)}
