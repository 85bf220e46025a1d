"""The speed of this machine's memory, which a cost is predicted from: measured once, in some milliseconds, and kept.

On synthetic data: no model is forwarded.
"""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

import torch

from ..model.replay import wait
from ..store import Document

READ_BYTES = 128 << 20  # more than most caches hold


def machine(device: torch.device) -> dict[str, Any]:
    """The device's name, and the number of threads that serve it."""
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device)}
    name = platform.processor() or platform.machine()
    return {"device": name, "node": platform.node(), "threads": torch.get_num_threads()}


_known: dict[tuple[Path, str], float] = {}


def bandwidth(device: torch.device) -> float:
    """Bytes a second that the device's memory reads: measured once, unless the disk knows it."""
    document = Document("machine", {**machine(device), "type": device.type})
    key = (document.path, str(device))
    if key not in _known:
        value = document.read().get("bandwidth")
        if value is None:
            value = measure_bandwidth(device)
            document.write({"bandwidth": value})
        _known[key] = value
    return _known[key]


def measure_bandwidth(device: torch.device) -> float:
    """Bytes a second that are read of more memory than caches hold, as weights are: the fastest of three times."""
    source, best = torch.ones(READ_BYTES // 8, dtype=torch.int64, device=device), float("inf")
    for _ in range(3):  # the first one touches the pages
        wait(device)
        begin = time.perf_counter()
        source.amax()
        wait(device)
        best = min(best, time.perf_counter() - begin)
    return READ_BYTES / max(best, 1e-6)
