"""Seconds of a call, and the bandwidth of copying and of reading memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.benchmark import Timer

from gsd_kernels_hf.model.replay import replayable

MIN_SAMPLES = 5


@dataclass(frozen=True)
class Timing:
    """Seconds of one call. ``clock`` names what measured it: ``wall``, ``events`` or ``cuda graph``."""

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
    from triton.testing import do_bench

    call = replayable(function, device)
    samples: list[float] = []
    while len(samples) < MIN_SAMPLES:
        samples += [1e-3 * ms for ms in do_bench(call, rep=max(1, round(1e3 * seconds)), return_mode="all")]
    return Timing.of(samples, "events" if call is function else "cuda graph")


def copy_bandwidth(device: torch.device, *, quick: bool = False) -> float:
    """Bytes per second of one large ``Tensor.copy_``, read and write both counted."""
    size = (64 << 20) if quick else (1 << 30 if device.type == "cuda" else 256 << 20)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = time_call(lambda: target.copy_(source), device, seconds=0.3)
    return 2 * size / timing.median


def read_bandwidth(device: torch.device, *, quick: bool = False) -> float:
    """Bytes per second of summing one large tensor, which is only read."""
    size = (64 << 20) if quick else (1 << 30 if device.type == "cuda" else 256 << 20)
    source = torch.ones(size // 4, device=device)
    timing = time_call(source.sum, device, seconds=0.3)
    return size / timing.median
