"""A function as one CUDA graph, for timing what runs captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def replayable(function: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """``function`` as one CUDA graph, where it can be captured; itself on a CPU, or where it waits for the device."""
    if device.type != "cuda":
        return function
    function()  # compiles kernels and makes storage
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            function()
    except RuntimeError:
        torch.cuda.synchronize(device)
        return function
    return graph.replay
