"""Measure launch configurations of the Triton attention on this GPU and write ``gsd_kernels/attention_configs.json``.

Offline and explicit: nothing is tuned at run time. Only the entries of this GPU's compute capability change; each
names the device that it was measured on. Configurations that spill or do not fit are never launched.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from gsd_kernels.attention_config import TABLE, AttentionConfig
from gsd_kernels_cli.kernel_report import SHARED_LIMIT, compile_launches, facts, gate

HEAD_DIMS = (64, 128, 256)
SIZES_M = (16, 32, 64, 128, 512)  # upper ends of the table's ranges; the last stands for all larger ones
KV_HEADS = 8


def run(prefix: int, *, dry_run: bool = False) -> None:
    """Measure every range of shapes over ``prefix`` committed positions; rewrite or print this GPU's entries.

    Raises:
        RuntimeError: no GPU, or one whose limits are unknown.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA GPU: there is nothing to measure")
    major, minor = torch.cuda.get_device_capability()
    arch = 10 * major + minor
    if arch not in SHARED_LIMIT:
        raise RuntimeError(f"compute capability {major}.{minor} is not known to gsd_kernels_cli.kernel_report")
    shapes = itertools.product((torch.bfloat16, torch.float32), HEAD_DIMS, SIZES_M, (False, True))
    entries = [best_entry(arch, prefix, *shape) for shape in shapes]
    table = json.loads(TABLE.read_text())
    table["archs"][str(arch)] = entries
    lines = [
        f'    "{name}": [\n' + ",\n".join("      " + json.dumps(e) for e in rows) + "\n    ]"
        for name, rows in table["archs"].items()
    ]
    text = '{\n  "archs": {\n' + ",\n".join(lines) + "\n  }\n}\n"
    if dry_run:
        print(text)
    else:
        TABLE.write_text(text)


def best_entry(arch: int, prefix: int, dtype: torch.dtype, head_dim: int, size_m: int, extras: bool) -> dict[str, Any]:
    """The table entry of one range of shapes: the fastest configuration that compiles without spilling.

    By the median over replays of captured graphs.
    """
    from triton.testing import do_bench_cudagraph

    launch = launches(prefix, dtype, head_dim, size_m, extras)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    tiles = [m for m in (16, 32, 64, 128) if m < 2 * size_m]
    widths = (32, 64, 128) if dtype.itemsize == 2 else (16, 32, 64)
    choices = (tiles, widths, (4, 8), (1, 2, 3, 4), (processors, 2 * processors, 4 * processors))
    timed = []
    for config in itertools.starmap(AttentionConfig, itertools.product(*choices)):
        kernels = compile_launches(launch(config, "meta"), arch)
        if not any(gate(facts(kernel, arch)) for _, kernel in kernels):
            timed.append((1000 * do_bench_cudagraph(launch(config, "cuda"), return_mode="median"), config))
    time_us, config = min(timed, key=lambda t: t[0])
    print(f"{dtype} D{head_dim} M{size_m} extras={extras}: {time_us:.1f} µs {config}, of {len(timed)} configurations")
    return {
        "element_size": dtype.itemsize,
        "max_head_dim": head_dim,
        "max_m": None if size_m == SIZES_M[-1] else size_m,
        "max_capacity": None,
        "with_extras": extras,
        **asdict(config),
        "measured_on": torch.cuda.get_device_name(),
    }


def launches(
    prefix: int, dtype: torch.dtype, head_dim: int, size_m: int, extras: bool
) -> Callable[[AttentionConfig, str], Callable[[], Tensor]]:
    """One attention, to be compiled and timed with any configuration, on a device."""
    from gsd_kernels.ops.dag_attention.triton import dag_attention

    group = min(4, size_m // 16)
    rows = size_m // group
    nodes = -(-rows // 32)

    def launch(config: AttentionConfig, device: str) -> Callable[[], Tensor]:
        def ints(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        q = torch.zeros(1, KV_HEADS * group, rows, head_dim, dtype=dtype, device=device)
        k, v = (torch.zeros(1, KV_HEADS, prefix + 512, head_dim, dtype=dtype, device=device) for _ in range(2))
        lengths = (ints(1, fill=prefix), ints(1))
        depths = (ints(1, rows), ints(1, 32 * nodes))
        options = (50.0, prefix, None, None) if extras else (None,) * 4
        arguments = (q, k, v, ints(1, rows, nodes, fill=-1), *lengths, *depths, head_dim**-0.5, *options)
        return lambda: dag_attention(*arguments, config)

    return launch
