"""Seconds of a call, and the bandwidth of copying and of reading memory.

On a GPU events around a call measure the call only where the GPU comes to the first of them after the host has queued
everything. On an idle GPU the first event is recorded at once, and the time in which the host launches counts as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.benchmark import Timer

from gsd_kernels_hf.model.replay import replayable

MIN_SAMPLES = 5
WARM_SAMPLES = 3  # of a GPU, not counted: clocks rise, a graph's first launch uploads it
FIRST_SPIN_CYCLES, MAX_SPIN_CYCLES = 1 << 17, 1 << 27  # GPU cycles: about 70 µs and 70 ms
PRODUCT_ROWS, PRODUCT_INPUTS = 16, 8192  # of a product that reads as fast as any
CACHE_MULTIPLE = 3  # bytes of what is read before a call, as a multiple of the second-level cache


@dataclass(frozen=True)
class Timing:
    """Seconds of one call. ``clock`` names what measured it: ``wall``, ``events`` or ``cuda graph``.

    ``host included``: between the events the GPU waited for the host.
    """

    median: float
    p20: float
    p80: float
    samples: int
    clock: str

    @classmethod
    def of(cls, samples: list[float], clock: str) -> Timing:
        """Quantiles of seconds."""
        p20, median, p80 = np.quantile(samples, (0.2, 0.5, 0.8)).tolist()
        return cls(median, p20, p80, len(samples), clock)


def time_call(function: Callable[[], Any], device: torch.device, *, seconds: float = 0.5) -> Timing:
    """Time ``function`` for about ``seconds`` (at least five samples), after a warm-up.

    On a GPU: device time with a cold second-level cache, as one CUDA graph where the call can be captured, because
    that is how a decoding step runs. On a CPU: wall time; a sample of a short call is the mean of several.
    """
    function()
    if device.type == "cuda":
        return _time_on_gpu(function, device, seconds)
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    samples: list[float] = []
    while len(samples) < MIN_SAMPLES:
        samples += timer.blocked_autorange(min_run_time=seconds).times
    return Timing.of(samples, "wall")


def _time_on_gpu(function: Callable[[], Any], device: torch.device, seconds: float) -> Timing:
    """Time a call on a GPU that spins until all of it is queued.

    Whether it did is asked of the first event: one that is reached already when the host is done was too early, and the
    sample is taken again behind a longer spin. A call that waits for the GPU itself keeps no queue; its samples count
    the host's time, and the clock says so. Before each call nothing is left in the second-level cache but zeros, read
    and not written: what was written would be carried out to memory while the call reads.
    """
    call = replayable(function, device)
    zeros = torch.zeros(CACHE_MULTIPLE * torch.cuda.get_device_properties(device).L2_cache_size // 4, device=device)
    total = torch.empty((), device=device)
    samples: list[float] = []
    spin, idle, over = FIRST_SPIN_CYCLES, False, math.inf
    while len(samples) < WARM_SAMPLES + MIN_SAMPLES or time.perf_counter() < over:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.sum(zeros, 0, out=total)
        torch.cuda._sleep(spin)
        begin.record()
        call()
        end.record()
        early = begin.query()
        end.synchronize()
        if early and spin < MAX_SPIN_CYCLES:
            spin *= 2
            continue
        idle |= early
        samples.append(begin.elapsed_time(end) / 1e3)
        if len(samples) == WARM_SAMPLES:
            over = time.perf_counter() + seconds
    clock = "events" if call is function else "cuda graph"
    return Timing.of(samples[WARM_SAMPLES:], f"{clock}, host included" if idle else clock)


def copy_bandwidth(device: torch.device, *, quick: bool) -> float:
    """Bytes per second of one large ``Tensor.copy_``, read and write both counted."""
    size = (64 << 20) if quick else (1 << 30 if device.type == "cuda" else 256 << 20)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / time_call(lambda: target.copy_(source), device, seconds=0.3).median


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second at which a GPU reads one large tensor, by a sum of it or by cuBLAS: the better one."""
    size = 1 << 30
    source = torch.ones(size // 4, device=device)
    matrix = source.view(torch.bfloat16).view(-1, PRODUCT_INPUTS)
    x = torch.ones(PRODUCT_ROWS, PRODUCT_INPUTS, dtype=matrix.dtype, device=device)
    calls = (source.sum, lambda: torch.nn.functional.linear(x, matrix))
    return size / min(time_call(call, device, seconds=0.3).median for call in calls)
