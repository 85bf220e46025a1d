"""Measure launch configurations of the Triton attention on this GPU and write ``gsd_kernels/attention_configs.json``.

Offline and explicit: nothing is tuned at run time. Only the entries of this GPU's compute capability change; each
names the device that it was measured on. Configurations that spill or do not fit are never launched.
"""

from __future__ import annotations

import itertools
import json
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
    entries = [
        best_entry(arch, dtype, head_dim, size_m, prefix, extras)
        for dtype in (torch.bfloat16, torch.float32)
        for head_dim in HEAD_DIMS
        for size_m in SIZES_M
        for extras in (False, True)
    ]
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


def best_entry(arch: int, dtype: torch.dtype, head_dim: int, size_m: int, prefix: int, extras: bool) -> dict[str, Any]:
    """The table entry of one range of shapes: the fastest configuration that compiles without spilling."""
    problem = Problem(dtype, head_dim, size_m, prefix, extras)
    timed = [(problem.microseconds(c), c) for c in candidates(dtype, size_m) if problem.fits(c, arch)]
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


def candidates(dtype: torch.dtype, size_m: int) -> list[AttentionConfig]:
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    tiles = [m for m in (16, 32, 64, 128) if m < 2 * size_m]
    widths = (32, 64, 128) if dtype.itemsize == 2 else (16, 32, 64)
    choices = itertools.product(tiles, widths, (4, 8), (1, 2, 3, 4), (processors, 2 * processors, 4 * processors))
    return [AttentionConfig(*choice) for choice in choices]


class Problem:
    """One attention launch, to be compiled and timed with any configuration."""

    def __init__(self, dtype: torch.dtype, head_dim: int, size_m: int, prefix: int, extras: bool) -> None:
        group = min(4, size_m // 16)
        self.rows = size_m // group
        self.shapes = {"q": (1, KV_HEADS * group, self.rows, head_dim), "kv": (1, KV_HEADS, prefix + 512, head_dim)}
        self.dtype, self.prefix, self.extras = dtype, prefix, extras

    def launch(self, config: AttentionConfig, device: str) -> Any:
        from gsd_kernels.ops.dag_attention.triton import dag_attention

        def ints(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        q = torch.zeros(self.shapes["q"], dtype=self.dtype, device=device)
        k, v = (torch.zeros(self.shapes["kv"], dtype=self.dtype, device=device) for _ in range(2))
        nodes = -(-self.rows // 32)
        lengths = (ints(1, fill=self.prefix), ints(1))
        depths = (ints(1, self.rows), ints(1, 32 * nodes))
        options = (50.0, self.prefix, None, None) if self.extras else (None,) * 4
        arguments = (q, k, v, ints(1, self.rows, nodes, fill=-1), *lengths, *depths, q.shape[-1] ** -0.5, *options)
        return lambda: dag_attention(*arguments, config)

    def fits(self, config: AttentionConfig, arch: int) -> bool:
        kernels = compile_launches(self.launch(config, "meta"), arch)
        return not any(gate(facts(kernel, arch)) for _, kernel in kernels)

    def microseconds(self, config: AttentionConfig) -> float:
        """Median over replays of captured graphs."""
        from triton.testing import do_bench_cudagraph

        return 1000 * do_bench_cudagraph(self.launch(config, "cuda"), return_mode="median")
