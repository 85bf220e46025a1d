"""Measure launch configurations of the Triton attention on this GPU and write ``gsd_kernels/attention_configs.json``.

    python -m gsd_kernels_bench.tune_attention [--prefix 4096] [--dry-run]

Offline and explicit: nothing is tuned at run time. Only the entries of this GPU's compute capability change; each
names the device that it was measured on. Configurations that spill or do not fit are never launched.
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

import torch
from torch import Tensor

from gsd_kernels.attention_config import TABLE, AttentionConfig
from gsd_kernels.kernel_report import SHARED_LIMIT, compile_launches, facts, gate

HEAD_DIMS = (64, 128, 256)
SIZES_M = (16, 32, 64, 128, 512)  # upper ends of the table's ranges; the last stands for all larger ones
KV_HEADS = 8
REPEATS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=int, default=4096, help="committed positions of the measured problem")
    parser.add_argument("--dry-run", action="store_true", help="print the entries, write nothing")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU: there is nothing to measure")
    major, minor = torch.cuda.get_device_capability()
    arch = 10 * major + minor
    if arch not in SHARED_LIMIT:
        parser.error(f"compute capability {major}.{minor} is not known to gsd_kernels.kernel_report")
    entries = [
        best_entry(arch, dtype, head_dim, size_m, arguments.prefix, extras)
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
    if arguments.dry_run:
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
        "block_m": config.block_m,
        "block_n": config.block_n,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "programs": config.programs,
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
        lengths = (ints(1, fill=self.prefix), ints(1), ints(1, fill=self.rows))
        depths = (ints(1, self.rows), ints(1, 32 * nodes))
        options = (50.0, self.prefix) if self.extras else (None, None)
        arguments = (q, k, v, ints(1, self.rows, nodes, fill=-1), *lengths, *depths, q.shape[-1] ** -0.5, *options)
        return lambda: dag_attention(*arguments, config)

    def fits(self, config: AttentionConfig, arch: int) -> bool:
        kernels = compile_launches(self.launch(config, "meta"), arch)
        return not any(gate(facts(kernel, arch)) for _, kernel in kernels)

    def microseconds(self, config: AttentionConfig) -> float:
        """Median over replays of a captured graph."""
        launch = self.launch(config, "cuda")
        for _ in range(3):
            launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        times = []
        for _ in range(REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(1000 * start.elapsed_time(end))
        return sorted(times)[REPEATS // 2]


if __name__ == "__main__":
    main()
