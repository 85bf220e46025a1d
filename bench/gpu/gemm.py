"""Products of few rows with the matrices of 8B and 70B models, as cuBLAS does them, against reading the weights once.

The weights rotate through copies that the second-level cache cannot hold: a decoding step reads every matrix once.
"""

from __future__ import annotations

from typing import Any

import torch

from gsd_kernels_cli.demo.inflate import ModelShape

from ..lib.cold import copies_for, time_rotating
from ..lib.shapes import shape_named
from ..lib.timing import copy_bandwidth, read_bandwidths
from .work import Work

ROWS = (16, 64, 128, 256)
FEWER = (1, 8, 32, 2, 4)
MODELS = ("llama-3-8b", "llama-3.2-1b")
LATER = ("llama-2-70b",)


def run(work: Work) -> None:
    """Points ``bandwidth`` and ``MODEL MATRIX M=ROWS``: seconds, and the fraction of the floor that is reached."""
    order = [(MODELS, ROWS), (LATER, ROWS), ((*MODELS, *LATER), FEWER)]
    work.each(["bandwidth"], lambda _: bandwidth(work))
    names = {
        f"{model} {matrix} M={count}": (model, matrix, count)
        for models, rows in ([(("tiny",), (1, 8))] if work.rehearse else order)
        for model in models
        for matrix in matrices(shape_named(model))
        for count in rows
    }
    if work.is_done("bandwidth"):
        work.each(names, lambda name: product(work, *names[name]))


def matrices(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of every matrix of a layer with what can be packed packed, and of the output head."""
    width, heads = shape.hidden_size, shape.num_heads * shape.head_dim
    return {
        "qkv": (heads + 2 * shape.num_key_value_heads * shape.head_dim, width),
        "o": (width, heads),
        "gate_up": (2 * shape.intermediate_size, width),
        "down": (width, shape.intermediate_size),
        "lm_head": (shape.vocab_size, width),
    }


def bandwidth(work: Work) -> dict[str, Any]:
    """Bytes per second of a copy (read and written ones) and of reading."""
    found = {"copy": copy_bandwidth(work.device, quick=work.rehearse)}
    found |= read_bandwidths(work.device, quick=work.rehearse)
    print(", ".join(f"{name} {value / 1e9:.0f} GB/s" for name, value in found.items()), flush=True)
    return found


@torch.no_grad()
def product(work: Work, model: str, matrix: str, rows: int) -> dict[str, Any]:
    """Time ``x @ weight.T`` with ``rows`` rows of x."""
    outputs, inputs = matrices(shape_named(model))[matrix]
    x = torch.randn(rows, inputs, device=work.device, dtype=work.dtype)
    count = copies_for(outputs * inputs * work.dtype.itemsize, work.device)
    weights = [torch.randn(outputs, inputs, device=work.device, dtype=work.dtype) for _ in range(count)]
    calls = [lambda weight=weight: torch.nn.functional.linear(x, weight) for weight in weights]
    timing = time_rotating(calls, work.device, seconds=0.02 if work.rehearse else 0.15)
    moved = (outputs * inputs + rows * (outputs + inputs)) * work.dtype.itemsize
    found = work.points["bandwidth"]
    floor = moved / max(found["copy"], found["read"])
    print(f"  {timing.median * 1e6:.1f} µs, {floor / timing.median:.2f} of the floor", flush=True)
    return {
        **vars(timing),
        "model": model,
        "matrix": matrix,
        "shape": [rows, outputs, inputs],
        "copies": count,
        "bytes": moved,
        "floor_seconds": floor,
        "of_floor": floor / timing.median,
    }
