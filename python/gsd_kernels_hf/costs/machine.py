"""Speeds of this machine that a cost is predicted from: measured once, in some milliseconds, and kept on disk.

On synthetic data: no model is forwarded.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gsd_kernels.backends import unavailable_reason
from gsd_kernels.ops.row_linear import row_linear

from ..model.linear import serves
from ..model.replay import wait
from ..store import Document

READ_BYTES = 128 << 20  # more than most caches hold
FEW_ROWS, MANY_ROWS = 8, 32  # whose difference in seconds is arithmetic
# Of a matrix that stays in the last-level cache; of a smaller one, waiting for threads would be measured.
OUTPUTS, INPUTS = 12288, 1024
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def machine(device: torch.device) -> dict[str, Any]:
    """The device's name, and the number of threads that serve it."""
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device)}
    name = platform.processor() or platform.machine()
    return {"device": name, "node": platform.node(), "threads": torch.get_num_threads()}


_known: dict[tuple[Path, str, str], float] = {}


def _once(device: torch.device, name: str, measure: Callable[[], float]) -> float:
    """A property of the machine: measured once, unless the disk knows it."""
    document = Document("machine", {**machine(device), "type": device.type})
    key = (document.path, str(device), name)
    if key not in _known:
        value = document.read().get(name)
        if value is None:
            value = measure()
            document.write({name: value})
        _known[key] = value
    return _known[key]


def bandwidth(device: torch.device) -> float:
    """Bytes a second that the device's memory reads."""
    return _once(device, "bandwidth", lambda: measure_bandwidth(device))


def gemm_speed(dtype: torch.dtype, level: str | None) -> float | None:
    """Multiplications a second of a few rows with weights that are in a cache already, on the CPU.

    Args:
        dtype: of the weights.
        level: instructions of the operator that forwards rows; ``None``: modules do.

    Returns:
        ``None`` for a dtype that no CPU multiplies.
    """
    if dtype not in FLOATS:
        return None
    name = f"gemm {dtype} {level or 'modules'}"
    return _once(torch.device("cpu"), name, lambda: measure_gemm_speed(dtype, operator=level is not None))


def measure_bandwidth(device: torch.device) -> float:
    """Bytes a second that are read of more memory than caches hold, as weights are."""
    source = torch.ones(READ_BYTES // 8, dtype=torch.int64, device=device)
    return READ_BYTES / max(_fastest(source.amax, device), 1e-6)


@torch.no_grad()
def measure_gemm_speed(dtype: torch.dtype, *, operator: bool) -> float:
    """Multiplications a second of rows with a matrix, beyond what a few take: as the operator does them, or modules."""
    cpu = torch.device("cpu")
    weight = torch.full((OUTPUTS, INPUTS), 1.0 / INPUTS, dtype=dtype, device=cpu)
    weight = torch.nn.Parameter(weight, requires_grad=False)
    x = torch.ones(MANY_ROWS, INPUTS, dtype=dtype, device=cpu)
    own = operator or (unavailable_reason("cpu", cpu) is None and serves(weight))
    product = row_linear if own else torch.nn.functional.linear
    few, many = (_fastest(lambda rows=rows: product(x[:rows], weight), cpu) for rows in (FEW_ROWS, MANY_ROWS))
    return (MANY_ROWS - FEW_ROWS) * weight.numel() / max(many - few, 1e-6)


def _fastest(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of three runs; the first one touches the pages."""
    best = float("inf")
    for _ in range(3):
        wait(device)
        begin = time.perf_counter()
        function()
        wait(device)
        best = min(best, time.perf_counter() - begin)
    return best
