"""A report of what the compiler makes of every Triton kernel, for GPUs that are not here.

The ops' own launch code runs on meta tensors under a driver that only names a target; triton compiles down to machine
code with the assembler in its wheel, and the disassembly is counted. Importing this module imports no triton.
"""

from __future__ import annotations

import pkgutil
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


def _floats(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.float32)


def _long(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.int64)


def _flags(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.bool)


def _case(op: str, name: str, place: str, *arguments: Any) -> Case:
    """A call of ``place``, ``room.module:function`` below :mod:`gsd_kernels.ops`, which is imported when it is made."""
    return Case(op, name, lambda: pkgutil.resolve_name(f"gsd_kernels.ops.{place}")(*arguments))


HALF = torch.bfloat16


def shipped_cases() -> list[Case]:
    """Launches that between them use every kernel in every shipped configuration family."""
    return [
        *_attention_cases(),
        *_graph_cases(),
        *_sampling_cases(),
        *_cache_cases(),
    ]


def _attention_cases() -> list[Case]:
    def case(name: str, heads: int, kv_heads: int, rows: int, dim: int, dtype: torch.dtype, **options: Any) -> Case:
        cache = _meta(1, kv_heads, 8192, dim, dtype=dtype)
        inputs = (_meta(1, heads, rows, dim, dtype=dtype), cache, cache)
        places = (_meta(1, rows, 4), _meta(1), _meta(1), _meta(1, rows), _meta(1, 128))
        limits = (options.get("softcap"), options.get("window"), options.get("chunk"))
        sinks = _meta(heads, dtype=dtype) if "sinks" in options else None
        return _case(
            "dag_attention", name, "dag_attention.triton:dag_attention", *inputs, *places, dim**-0.5, *limits, sinks
        )

    return [
        case("bf16 D64 4×16 rows", 32, 8, 16, 64, HALF),  # the tile of 64
        case("bf16 D80 1×24 rows", 32, 32, 24, 80, HALF),  # of 32, padded dimensions
        case("fp16 D96 1×8 rows", 32, 32, 8, 96, torch.float16),  # of 16
        case("bf16 D128 4×16 rows", 32, 8, 16, 128, HALF),
        case("bf16 D128 8×64 rows", 64, 8, 64, 128, HALF),  # of 128
        case("bf16 D256 2×16 rows", 16, 8, 16, 256, HALF),
        case("bf16 D256 8×64 rows", 8, 1, 64, 256, HALF),
        case("bf16 D256 8×64 rows, soft cap, window", 8, 1, 64, 256, HALF, softcap=50.0, window=4096),
        case("bf16 D64 8×64 rows, sinks, window", 64, 8, 64, 64, HALF, window=128, sinks=True),
        case("bf16 D128 5×64 rows, chunks, window", 40, 8, 64, 128, HALF, chunk=8192),
        case("fp32 D128 4×16 rows", 32, 8, 16, 128, torch.float32),
        case("fp32 D256 1×16 rows", 8, 8, 16, 256, torch.float32),
    ]


def _graph_cases() -> list[Case]:
    def merge(name: str, depth: int, width: int, branch: int, merge_context: int = 1) -> Case:
        graph = TokenGraph.empty(1, GraphConfig(depth=depth, width=width, branch=branch), "meta").tensors()
        found = (_meta(1, width), _meta(1, width, branch), _floats(1, width, branch))
        return _case("merge", name, "merge.triton:merge", graph, *found, 1, width, merge_context, -1.0, -1.0)

    def flatten(branch: int, max_rows: int) -> Case:
        edges = (_meta(1, 1024, branch), _floats(1, 1024, branch))
        name = f"branch {branch}, {max_rows} rows"
        return _case("flatten", name, "flatten.triton:flatten", _meta(1, 1024), *edges, max_rows, max_rows - 1)

    rows = _meta(1, 128)
    state = (_meta(1, 128, 4), _meta(1), rows, _meta(2), _meta(1), _flags(1))
    return [
        merge("4×3 candidates, 64 nodes", 6, 4, 3),
        merge("tree", 6, 4, 3, merge_context=-1),
        merge("64×8 candidates, 1024 nodes", 2, 64, 8),
        flatten(3, 32),
        flatten(32, 128),
        _case("verify", "128 rows", "verify.triton:verify", rows, rows, rows, *state, 24),
    ]


def _sampling_cases() -> list[Case]:
    def case(name: str, count: int, dtype: torch.dtype, *parameters: float | Tensor | None) -> Case:
        drawn = (_meta(1, 64, 128256, dtype=dtype), _meta(1, 64), count, _long(), _meta(1))
        return _case("sampling", name, "sampling.triton:best_tokens", *drawn, *parameters, True, count > 1)

    each = _floats(1)
    cut = (_meta(1, 8, 128256, dtype=HALF), None, 0.7, None, 20.0, None, 0.9, None, 0.05)
    return [
        _case("sampling", "distribution after the warpers", "sampling.triton_cut:log_probs", *cut),
        case("greedy", 1, HALF, None, 0.0, None, 0.0, None, 1.0, None, 0.0),
        case("temperature", 1, HALF, None, 0.7, None, 0.0, None, 1.0, None, 0.0),
        case("temperature, candidates", 8, HALF, None, 0.7, None, 0.0, None, 1.0, None, 0.0),
        case("min-p", 1, HALF, None, 0.7, None, 0.0, None, 1.0, None, 0.05),
        case("all warpers, candidates", 4, torch.float32, each, 0.0, each, 0.0, each, 1.0, each, 0.0),
    ]


def _cache_cases() -> list[Case]:
    """Keys and values: a step's accepted rows behind the prefix, and a forward's into the cache."""

    def cases(name: str, dim: int, dtype: torch.dtype, accepted: int) -> list[Case]:
        cache = _meta(1, 8, 4096, dim, dtype=dtype)
        caches, rows = 4 * [cache], (_meta(1, accepted), _meta(1), _meta(1))
        new = _meta(1, 64, 8, dim, dtype=dtype).transpose(1, 2)
        return [
            _case("commit_kv", f"{name}, {accepted} rows", "commit_kv.triton:commit_kv", caches, caches, *rows),
            _case("write_kv", f"{name}, 64 rows", "write_kv.triton:write_kv", cache, cache, new, new, _long(1, 64)),
        ]

    return [*cases("bf16 D128", 128, HALF, 11), *cases("fp32 D256", 256, torch.float32, 128)]
