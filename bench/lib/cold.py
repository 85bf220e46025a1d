"""Calls timed on memory that no cache holds: each works on a copy of its own, and the copies outgrow the cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gsd_kernels_hf.model.replay import replayable

from .timing import MIN_SAMPLES, Timing

TIMES_THE_CACHE = 3
MOST_COPIES = 64


def copies_for(size: int, device: torch.device) -> int:
    """How many copies of ``size`` bytes outgrow the GPU's second-level cache by far; at least two, two on a CPU."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MOST_COPIES, max(2, -(-TIMES_THE_CACHE * cache // size)))


def time_rotating(calls: Sequence[Callable[[], Any]], device: torch.device, *, seconds: float = 0.2) -> Timing:
    """Seconds of one of ``calls``, which do the same work on different memory and run one after the other.

    On a GPU as one CUDA graph where they can be captured, by events; a sample is the mean over the calls.
    """

    def all_of_them() -> None:
        for call in calls:
            call()

    turn = replayable(all_of_them, device)
    turn()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < MIN_SAMPLES or time.perf_counter() < end:
        samples.append(_seconds(turn, device) / len(calls))
    clock = "wall" if device.type != "cuda" else "events" if turn is all_of_them else "cuda graph"
    return Timing.of(samples, f"rotating {clock}")


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        begin_time = time.perf_counter()
        call()
        return time.perf_counter() - begin_time
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
