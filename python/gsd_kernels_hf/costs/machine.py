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
from torch import Tensor

from gsd_kernels.backends import unavailable_reason
from gsd_kernels.graph import pack_bits
from gsd_kernels.ops.decoder_rows import DecoderWeights, LayerWeights, decoder_rows

from ..model.linear import CpuLinear
from ..model.replay import wait
from ..store import Document

READ_BYTES = 128 << 20  # more than most caches hold
FEW_ROWS, MANY_ROWS = 8, 32  # whose difference in seconds is arithmetic
# Sizes of a layer whose weights stay in the last-level cache; of smaller ones, waiting for threads would be measured.
HIDDEN, INNER, HEADS = 1024, 2816, 16
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def machine(device: torch.device) -> dict[str, Any]:
    """The device's name, and the number of threads that serve it."""
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device)}
    name = platform.processor() or platform.machine()
    return {"device": name, "node": platform.node(), "threads": torch.get_num_threads()}


_known: dict[tuple[Path, str, str], float] = {}


def _once(device: torch.device, name: str, between: tuple[float, float], measure: Callable[[], float]) -> float:
    """A property of the machine: measured once in a process unless the disk knows one that can be."""
    document = Document("machine", {**machine(device), "type": device.type})
    key = (document.path, str(device), name)
    if key not in _known:
        value = document.number(name, *between)
        if value is None:
            value = measure()
            document.write({name: value})
        _known[key] = value
    return _known[key]


def bandwidth(device: torch.device) -> float:
    """Bytes a second that the device's memory reads."""
    return _once(device, "bandwidth", (1e8, 1e14), lambda: measure_bandwidth(device))


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
    return _once(torch.device("cpu"), name, (1e6, 1e15), lambda: measure_gemm_speed(dtype, operator=level is not None))


def measure_bandwidth(device: torch.device) -> float:
    """Bytes a second that are read of more memory than caches hold, as weights are."""
    source = torch.ones(READ_BYTES // 8, dtype=torch.int64, device=device)
    return READ_BYTES / max(_fastest(source.amax, device), 1e-6)


@torch.no_grad()
def measure_gemm_speed(dtype: torch.dtype, *, operator: bool) -> float:
    """Multiplications a second of rows with a layer's weights, beyond what a few rows of it take."""
    weights, forward = (_layer if operator else _linear)(dtype)
    few, many = (_fastest(lambda rows=rows: forward(rows), torch.device("cpu")) for rows in (FEW_ROWS, MANY_ROWS))
    return (MANY_ROWS - FEW_ROWS) * weights / max(many - few, 1e-6)


def _linear(dtype: torch.dtype) -> tuple[int, Callable[[int], Tensor]]:
    """A linear layer as a target's modules have it: its weights, and its product with a number of rows."""
    compiled = unavailable_reason("cpu", torch.device("cpu")) is None and dtype != torch.float64
    kind = CpuLinear if compiled else torch.nn.Linear
    linear = torch.nn.utils.skip_init(kind, HIDDEN, 4 * INNER, bias=False, dtype=dtype)  # which draws nothing
    torch.nn.init.constant_(linear.weight, 1.0 / HIDDEN)
    x = torch.ones(MANY_ROWS, HIDDEN, dtype=dtype, device="cpu")
    return linear.weight.numel(), lambda rows: linear(x[:rows])


def _layer(dtype: torch.dtype) -> tuple[int, Callable[[int], Tensor]]:
    """A decoder of one layer: its weights, and the forward of a number of rows that see themselves alone."""

    def matrix(outputs: int, inputs: int) -> Tensor:
        return torch.full((outputs, inputs), 1.0 / inputs, dtype=dtype, device="cpu")

    size, norm = HIDDEN // HEADS, torch.ones(HIDDEN, dtype=dtype, device="cpu")
    layer = LayerWeights(
        **{name: matrix(HIDDEN, HIDDEN) for name in ("q", "k", "v", "o")},
        **{name: matrix(INNER, HIDDEN) for name in ("gate", "up")},
        down=matrix(HIDDEN, INNER),
        input_norm=norm,
        second_norm=norm,
    )
    weights = DecoderWeights(
        matrix(1, HIDDEN),
        [layer],
        norm,
        matrix(1, HIDDEN),
        torch.ones(size // 2, dtype=torch.float32, device="cpu"),
        1.0,
        HEADS,
        1e-5,
    )
    caches = [torch.zeros(1, HEADS, MANY_ROWS, size, dtype=dtype, device="cpu") for _ in range(2)]
    none, place = (
        torch.zeros(1, MANY_ROWS, dtype=torch.int32, device="cpu"),
        torch.arange(MANY_ROWS, dtype=torch.int32, device="cpu")[None],
    )

    def forward(rows: int) -> Tensor:
        zeros, alone = none[:, :rows].contiguous(), pack_bits(torch.eye(rows, dtype=torch.bool, device="cpu"))[None]
        slots, start = place[:, :rows].contiguous(), none[:, 0].contiguous()
        text = zeros, zeros, slots, alone, zeros, start, start
        return decoder_rows(weights, *text, caches[:1], caches[1:], keep=rows)[0]

    return HIDDEN * (4 * HIDDEN + 3 * INNER), forward


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
