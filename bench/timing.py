"""How long a call takes, and how fast this machine copies memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gsd_kernels_hf.engine.capture import replayable

SHORTEST = 100e-6  # seconds; shorter calls are timed several at once on a CPU
FLUSH_BYTES = 256 << 20  # more than any GPU's second-level cache


@dataclass(frozen=True)
class Timing:
    """Seconds of one call. ``clock`` says what measured it: ``wall``, ``events`` or ``cuda graph``."""

    median: float
    p20: float
    p80: float
    samples: int
    clock: str

    @classmethod
    def of(cls, samples: list[float], clock: str) -> Timing:
        ordered = sorted(samples)

        def quantile(share: float) -> float:
            return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]

        return cls(statistics.median(ordered), quantile(0.2), quantile(0.8), len(ordered), clock)


def time_call(function: Callable[[], Any], device: torch.device, *, seconds: float = 0.5) -> Timing:
    """Time ``function`` for about ``seconds`` (at least five times), after a warm-up.

    On a GPU: device time with a cold second-level cache, as one CUDA graph where the call can be captured, because
    that is how a decoding step runs. On a CPU: wall time.
    """
    if device.type == "cuda":
        return _time_on_gpu(function, device, seconds)
    function()
    begin = time.perf_counter()
    function()
    estimate = max(time.perf_counter() - begin, 1e-7)
    inner = max(1, round(SHORTEST / estimate))
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < 5 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        for _ in range(inner):
            function()
        samples.append((time.perf_counter() - start) / inner)
        if len(samples) >= 1000:
            break
    return Timing.of(samples, "wall")


def _time_on_gpu(function: Callable[[], Any], device: torch.device, seconds: float) -> Timing:
    for _ in range(3):
        function()
    torch.cuda.synchronize(device)
    call = replayable(function, device)
    clock = "events" if call is function else "cuda graph"
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < 5 or (time.perf_counter() - begin < seconds and len(samples) < 1000):
        pairs = []
        for _ in range(10):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(device)
        samples += [start.elapsed_time(end) / 1e3 for start, end in pairs]
    return Timing.of(samples, clock)


def copy_bandwidth(device: torch.device, *, quick: bool = False) -> float:
    """Bytes per second of one large ``Tensor.copy_``, read and write both counted."""
    size = (64 << 20) if quick else (1 << 30 if device.type == "cuda" else 256 << 20)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = time_call(lambda: target.copy_(source), device, seconds=0.3)
    return 2 * size / timing.median
