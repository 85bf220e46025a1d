"""Calls timed on memory that no cache holds: each works on a copy of its own, and the copies outgrow the cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gsd_kernels_hf.model.replay import replayable

from .timing import CACHE_MULTIPLE, MIN_SAMPLES, BusyQueue, Timing

MOST_COPIES = 64


def copies_for(size: int, device: torch.device) -> int:
    """How many copies of ``size`` bytes outgrow the GPU's second-level cache by far; at least two, two on a CPU."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MOST_COPIES, max(2, -(-CACHE_MULTIPLE * cache // size)))


def time_rotating(calls: Sequence[Callable[[], Any]], device: torch.device, *, seconds: float = 0.2) -> Timing:
    """Seconds of one of ``calls``, which do the same work on different memory and run one after the other.

    On a GPU as one CUDA graph where they can be captured, by events; a sample is the mean over the calls.
    """

    def all_of_them() -> None:
        for call in calls:
            call()

    turn = replayable(all_of_them, device)
    if device.type == "cuda":
        queue = BusyQueue()
        samples = queue.sample(turn, seconds)
        clock = queue.clock("events" if turn is all_of_them else "cuda graph")
    else:
        samples, clock = _on_the_host(turn, seconds), "wall"
    return Timing.of([sample / len(calls) for sample in samples], f"rotating {clock}")


def _on_the_host(call: Callable[[], Any], seconds: float) -> list[float]:
    call()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < MIN_SAMPLES or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        samples.append(time.perf_counter() - begin)
    return samples
