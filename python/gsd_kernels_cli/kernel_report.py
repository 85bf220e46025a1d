"""A report of what the compiler makes of every Triton kernel, for GPUs that are not here.

The ops' own launch code runs on meta tensors under a driver that only names a target; triton compiles down to machine
code with the assembler in its wheel, and the disassembly is counted. Importing this module imports no triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsd_kernels.config import GraphConfig
from gsd_kernels.graph import TokenGraph

ARCHS = (80, 90, 100)
SHARED_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that one thread block can have."""

MAX_STACK_BYTES = 8
"""Bytes of stack that a kernel may use: spilled registers live there."""


@dataclass(frozen=True)
class Case:
    """One launch of one op in a shipped configuration."""

    op: str
    name: str
    launch: Callable[[], object]


def kernel_table(
    archs: Sequence[int] = ARCHS, ops: Sequence[str] | None = None, read: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """One row per compiled kernel: registers, stack, shared memory, spills, load width, matrix instructions.

    Args:
        archs: compute capabilities, e.g. 90.
        ops: names of ops to compile; default all.
        read: names of kernels whose instructions are read, a fifth of a second each; default all.

    Returns:
        Dicts with keys op, case, kernel, arch, registers, stack_bytes, shared_kib, shared_limit_kib and ok (the gates
        on stack and shared memory hold); of kernels that were read spill_stores, spill_loads, load_bits, matrix and
        instructions as well.

    Raises:
        RuntimeError: triton runs interpreted in this process.
    """
    from triton import knobs

    if knobs.runtime.interpret:
        raise RuntimeError("kernel_table: TRITON_INTERPRET=1 leaves nothing to compile; unset it")
    rows = []
    for arch in archs:
        for case in shipped_cases():
            if ops is not None and case.op not in ops:
                continue
            seen = set()
            for kernel, compiled in compile_launches(case.launch, arch):
                if compiled.hash not in seen:
                    seen.add(compiled.hash)
                    row = facts(compiled, arch, read is None or kernel in read)
                    rows.append({"op": case.op, "case": case.name, "kernel": kernel, **row})
    return rows


def gate(row: dict[str, Any]) -> list[str]:
    """Say what is wrong with a row of the table: too much stack or shared memory."""
    problems = []
    if row["stack_bytes"] > MAX_STACK_BYTES:
        problems.append(f"{row['stack_bytes']} bytes of stack, allowed {MAX_STACK_BYTES}")
    if row["shared_kib"] > row["shared_limit_kib"]:
        problems.append(f"{row['shared_kib']} KiB of shared memory, the GPU has {row['shared_limit_kib']}")
    return problems


def compile_launches(launch: Callable[[], object], arch: int) -> list[tuple[str, Any]]:
    """Every kernel that ``launch`` starts, compiled for ``arch`` and not run: (name, compiled kernel)."""
    from triton.runtime.jit import JITFunction

    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.metadata.target.arch != arch:
            raise RuntimeError(f"{self.fn.__name__} was compiled for {kernel.metadata.target}, not {arch}")
        compiled.append((self.fn.__name__.strip("_").removesuffix("_kernel"), kernel))
        return kernel

    with _target(arch):
        JITFunction.run = record
        try:
            launch()
        finally:
            JITFunction.run = run
    return compiled


class _Target:
    """So much of a triton driver as compiling needs."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # triton caches kernels by device index: a constant would return another arch's kernel

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@contextmanager
def _target(arch: int) -> Iterator[None]:
    from triton import knobs
    from triton.runtime import driver

    previous = driver._active
    driver._active = _Target(arch)
    fusion = getattr(knobs.language, "default_fp_fusion", True)
    knobs.language.default_fp_fusion = True  # 3.9 warns when nobody has said
    try:
        yield
    finally:
        knobs.language.default_fp_fusion = fusion
        driver._active = previous


def facts(compiled: Any, arch: int, read: bool = True) -> dict[str, Any]:
    """Resources of one compiled kernel and, if they are to be read, counts of its instructions."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run(tools / "cuobjdump", "--dump-resource-usage", file.name)
        # Without an analysis of branches.
        code = _run(tools / "nvdisasm", "-c", "-ndf", file.name) if read else None
    numbers = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage)
    if numbers is None:
        raise RuntimeError(f"cuobjdump reported no resource usage: {usage[:200]}")
    registers, stack, static_shared = map(int, numbers.groups())
    row = {
        "arch": arch,
        "registers": registers,
        "stack_bytes": stack,
        "shared_kib": round((compiled.metadata.shared + static_shared) / 1024, 1),
        "shared_limit_kib": SHARED_LIMIT[arch],
    }
    return {**row, **({} if code is None else _instructions(code)), "ok": not gate(row)}


def _instructions(code: str) -> dict[str, Any]:
    """Counts of a disassembled kernel's instructions."""
    opcodes = Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]+)", code, re.M))

    def count(pattern: str) -> int:
        return sum(n for opcode, n in opcodes.items() if re.match(pattern, opcode))

    matrix = [f"{count(p)} {name}" for name, p in _MATRIX if count(p)]
    return {
        "spill_stores": count("STL"),
        "spill_loads": count("LDL"),
        "load_bits": _widest_load(opcodes),
        "matrix": ", ".join(matrix) or "-",
        "instructions": sum(opcodes.values()),
    }


_MATRIX = (("HMMA", "HMMA"), ("HGMMA", "HGMMA"), ("UTCMMA", "UTC.*MMA"))


def _widest_load(opcodes: Counter[str]) -> int:
    """Bits of the widest global load instruction."""
    widths = [int(w) for op in opcodes if re.match(r"LDG", op) for w in re.findall(r"\.(64|128|256)\b", op)]
    return max(widths, default=32)


def _run(tool: Path, *args: str) -> str:
    return subprocess.run([str(tool), *args], capture_output=True, text=True, check=True).stdout


def _meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def shipped_cases() -> list[Case]:
    """Launches that between them use every kernel in every shipped configuration family."""
    return [
        *_attention_cases(),
        *_graph_cases(),
        *_sampling_cases(),
        *_commit_cases(),
        *_write_cases(),
        *_ngram_cases(),
    ]


def _attention_cases() -> list[Case]:
    def case(name: str, heads: int, kv_heads: int, rows: int, dim: int, dtype: torch.dtype, **options: Any) -> Case:
        def launch() -> None:
            from gsd_kernels.ops.dag_attention.triton import dag_attention

            cache = (1, kv_heads, 8192, dim)
            dag_attention(
                _meta(1, heads, rows, dim, dtype=dtype),
                _meta(*cache, dtype=dtype),
                _meta(*cache, dtype=dtype),
                _meta(1, rows, 4),
                _meta(1),
                _meta(1),
                _meta(1, rows),
                _meta(1, 128),
                dim**-0.5,
                options.get("softcap"),
                options.get("window"),
                options.get("chunk"),
                _meta(heads, dtype=dtype) if "sinks" in options else None,
            )

        return Case("dag_attention", name, launch)

    half, single = torch.bfloat16, torch.float32
    return [
        case("bf16 D64 4×16 rows", 32, 8, 16, 64, half),  # the tile of 64
        case("bf16 D80 1×24 rows", 32, 32, 24, 80, half),  # of 32, padded dimensions
        case("fp16 D96 1×8 rows", 32, 32, 8, 96, torch.float16),  # of 16
        case("bf16 D128 4×16 rows", 32, 8, 16, 128, half),
        case("bf16 D128 8×64 rows", 64, 8, 64, 128, half),  # of 128
        case("bf16 D256 2×16 rows", 16, 8, 16, 256, half),
        case("bf16 D256 8×64 rows", 8, 1, 64, 256, half),
        case("bf16 D256 8×64 rows, soft cap, window", 8, 1, 64, 256, half, softcap=50.0, window=4096),
        case("bf16 D64 8×64 rows, sinks, window", 64, 8, 64, 64, half, window=128, sinks=True),
        case("bf16 D128 5×64 rows, chunks, window", 40, 8, 64, 128, half, chunk=8192),
        case("fp32 D128 4×16 rows", 32, 8, 16, 128, single),
        case("fp32 D256 1×16 rows", 8, 8, 16, 256, single),
    ]


def _graph_cases() -> list[Case]:
    def merge(depth: int, width: int, branch: int, merge_context: int = 1) -> Callable[[], object]:
        def launch() -> None:
            from gsd_kernels.ops.merge.triton import merge

            graph = TokenGraph.empty(1, GraphConfig(depth=depth, width=width, branch=branch), "meta")
            shape = (1, width, branch)
            log_probs = _meta(*shape, dtype=torch.float32)
            merge(graph.tensors(), _meta(1, width), _meta(*shape), log_probs, 1, width, merge_context, -1.0, -1.0)

        return launch

    def flatten(branch: int, max_rows: int) -> Callable[[], object]:
        def launch() -> None:
            from gsd_kernels.ops.flatten.triton import flatten

            edges = (1, 1024, branch)
            flatten(_meta(1, 1024), _meta(*edges), _meta(*edges, dtype=torch.float32), max_rows, max_rows - 1)

        return launch

    def verify() -> None:
        from gsd_kernels.ops.verify.triton import verify

        rows = _meta(1, 128)
        done = _meta(1, dtype=torch.bool)
        verify(rows, rows, rows, _meta(1, 128, 4), _meta(1), rows, _meta(2), _meta(1), done, 24)

    return [
        Case("merge", "4×3 candidates, 64 nodes", merge(6, 4, 3)),
        Case("merge", "tree", merge(6, 4, 3, merge_context=-1)),
        Case("merge", "64×8 candidates, 1024 nodes", merge(2, 64, 8)),
        Case("flatten", "branch 3, 32 rows", flatten(3, 32)),
        Case("flatten", "branch 32, 128 rows", flatten(32, 128)),
        Case("verify", "128 rows", verify),
    ]


def _sampling_cases() -> list[Case]:
    def case(name: str, count: int, dtype: torch.dtype, *parameters: float | Tensor | None) -> Case:
        def launch() -> None:
            from gsd_kernels.ops.sampling.triton import best_tokens

            logits = _meta(1, 64, 128256, dtype=dtype)
            seed = _meta(dtype=torch.int64)
            best_tokens(logits, _meta(1, 64), count, seed, _meta(1), *parameters, True, count > 1)

        return Case("sampling", name, launch)

    def each() -> Tensor:
        return _meta(1, dtype=torch.float32)

    def distribution() -> None:
        from gsd_kernels.ops.sampling.triton_cut import log_probs

        log_probs(_meta(1, 8, 128256, dtype=torch.bfloat16), None, 0.7, None, 20.0, None, 0.9, None, 0.05)

    return [
        Case("sampling", "distribution after the warpers", distribution),
        case("greedy", 1, torch.bfloat16, None, 0.0, None, 0.0, None, 1.0, None, 0.0),
        case("temperature", 1, torch.bfloat16, None, 0.7, None, 0.0, None, 1.0, None, 0.0),
        case("temperature, candidates", 8, torch.bfloat16, None, 0.7, None, 0.0, None, 1.0, None, 0.0),
        case("min-p", 1, torch.bfloat16, None, 0.7, None, 0.0, None, 1.0, None, 0.05),
        case("all warpers, candidates", 4, torch.float32, each(), 0.0, each(), 0.0, each(), 1.0, each(), 0.0),
    ]


def _commit_cases() -> list[Case]:
    def case(name: str, dim: int, dtype: torch.dtype, width: int) -> Case:
        def launch() -> None:
            from gsd_kernels.ops.commit_kv.triton import commit_kv

            caches = [_meta(1, 8, 4096, dim, dtype=dtype) for _ in range(4)]
            commit_kv(caches, caches, _meta(1, width), _meta(1), _meta(1))

        return Case("commit_kv", name, launch)

    return [case("bf16 D128, 11 rows", 128, torch.bfloat16, 11), case("fp32 D256, 128 rows", 256, torch.float32, 128)]


def _write_cases() -> list[Case]:
    def case(name: str, dim: int, dtype: torch.dtype, rows: int) -> Case:
        def launch() -> None:
            from gsd_kernels.ops.write_kv.triton import write_kv

            cache = _meta(1, 8, 4096, dim, dtype=dtype)
            projected = _meta(1, rows, 8, dim, dtype=dtype).transpose(1, 2)
            write_kv(cache, cache, projected, projected, _meta(1, rows, dtype=torch.int64))

        return Case("write_kv", name, launch)

    return [case("bf16 D128, 64 rows", 128, torch.bfloat16, 64), case("fp32 D256, 64 rows", 256, torch.float32, 64)]


def _ngram_cases() -> list[Case]:
    def table(branch: int) -> tuple[Tensor, Tensor, Tensor]:
        size = (1, 1 << 15)
        return _meta(*size, dtype=torch.int64), _meta(*size, branch), _meta(*size, branch, dtype=torch.float32)

    def insert(branch: int, max_context: int, ways: int) -> Callable[[], object]:
        def launch() -> None:
            from gsd_kernels.ops.ngram.triton_insert import ngram_insert

            new = (_meta(1, 64, branch), _meta(1, 64, branch, dtype=torch.float32), _meta(1, 64, dtype=torch.bool))
            ngram_insert(*table(branch), _meta(1, 64, 8), *new, max_context, ways)

        return launch

    def lookup(branch: int, max_context: int, ways: int) -> Callable[[], object]:
        def launch() -> None:
            from gsd_kernels.ops.ngram.triton import ngram_lookup

            ngram_lookup(*table(branch), _meta(1, 8, 8), max_context, ways)

        return launch

    def perturb(branch: int) -> Callable[[], object]:
        def launch() -> None:
            from gsd_kernels.ops.ngram.triton import perturb_candidates

            source = _meta(1, 8, branch), _meta(1, 8, branch, dtype=torch.float32)
            perturb_candidates(*source, _meta(1, 8), _meta(dtype=torch.int64), _meta(1))

        return launch

    def mix(branch: int) -> Callable[[], object]:
        def launch() -> None:
            from gsd_kernels.ops.ngram.triton import mix_candidates

            source = _meta(1, 8, branch), _meta(1, 8, branch, dtype=torch.float32)
            mix_candidates(*source, *source, _meta(1, 8, dtype=torch.float32))

        return launch

    return [
        Case("ngram", "4 lengths, 8 ways, branch 4", insert(4, 4, 8)),
        Case("ngram", "8 lengths, 16 ways, branch 32", insert(32, 8, 16)),
        Case("ngram", "4 lengths, 8 ways, branch 4", lookup(4, 4, 8)),
        Case("ngram", "8 lengths, 16 ways, branch 32", lookup(32, 8, 16)),
        Case("ngram", "4 candidates", perturb(4)),
        Case("ngram", "32 candidates", perturb(32)),
        Case("ngram", "4 and 4 candidates", mix(4)),
        Case("ngram", "32 and 32 candidates", mix(32)),
    ]
