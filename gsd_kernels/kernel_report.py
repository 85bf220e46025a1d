"""What the compiler makes of every Triton kernel, for GPUs that are not here.

The ops' own launch code runs on meta tensors under a driver that only names a target; triton compiles down to machine
code with the assembler in its wheel, and the disassembly is counted. Importing this module imports no triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ARCHS = (80, 90, 100)
SHARED_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that one thread block can have."""

MAX_STACK = 8
"""Bytes of stack that a kernel may use: spilled registers live there."""


@dataclass(frozen=True)
class Case:
    """One launch of one op in a shipped configuration."""

    op: str
    name: str
    launch: Callable[[], object]


def kernel_table(archs: Sequence[int] = ARCHS, ops: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """One row per compiled kernel: registers, stack, shared memory, spills, load width, matrix instructions.

    Args:
        archs: compute capabilities, e.g. 90.
        ops: names of ops to compile; default all.

    Returns:
        Dicts with keys op, case, kernel, arch, registers, stack_bytes, spill_stores, spill_loads, shared_kib,
        shared_limit_kib, load_bits, matrix, instructions and ok (the gates on stack and shared memory hold).

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
                    rows.append({"op": case.op, "case": case.name, "kernel": kernel, **facts(compiled, arch)})
    return rows


def gate(row: dict[str, Any]) -> list[str]:
    """What is wrong with a row of the table: too much stack or shared memory."""
    problems = []
    if row["stack_bytes"] > MAX_STACK:
        problems.append(f"{row['stack_bytes']} bytes of stack, allowed {MAX_STACK}")
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
    """As much of a triton driver as compiling needs."""

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


def facts(compiled: Any, arch: int) -> dict[str, Any]:
    """Resources and instruction counts of one compiled kernel."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run(tools / "cuobjdump", "--dump-resource-usage", file.name)
        code = _run(tools / "nvdisasm", file.name)
    numbers = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage)
    if numbers is None:
        raise RuntimeError(f"cuobjdump reported no resource usage: {usage[:200]}")
    registers, stack, static_shared = map(int, numbers.groups())
    opcodes = Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]+)", code, re.M))

    def count(pattern: str) -> int:
        return sum(n for opcode, n in opcodes.items() if re.match(pattern, opcode))

    matrix = [f"{count(p)} {name}" for name, p in _MATRIX if count(p)]
    row = {
        "arch": arch,
        "registers": registers,
        "stack_bytes": stack,
        "spill_stores": count("STL"),
        "spill_loads": count("LDL"),
        "shared_kib": round((compiled.metadata.shared + static_shared) / 1024, 1),
        "shared_limit_kib": SHARED_LIMIT[arch],
        "load_bits": _widest_load(opcodes),
        "matrix": ", ".join(matrix) or "-",
        "instructions": sum(opcodes.values()),
    }
    return {**row, "ok": not gate(row)}


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
    return [*_attention_cases()]


def _attention_cases() -> list[Case]:
    def case(name: str, heads: int, kv_heads: int, rows: int, dim: int, dtype: torch.dtype, **options: Any) -> Case:
        def launch() -> None:
            from .ops.dag_attention.triton import dag_attention

            cache = (1, kv_heads, 8192, dim)
            dag_attention(
                _meta(1, heads, rows, dim, dtype=dtype),
                _meta(*cache, dtype=dtype),
                _meta(*cache, dtype=dtype),
                _meta(1, rows, 4),
                _meta(1),
                _meta(1),
                _meta(1),
                _meta(1, rows),
                _meta(1, 128),
                dim**-0.5,
                options.get("softcap"),
                options.get("window"),
            )

        return Case("dag_attention", name, launch)

    cases = []
    for dim in (64, 80, 96, 128, 256):
        cases += [case(f"bf16 D{dim} 4×16 rows", 32, 8, 16, dim, torch.bfloat16)]
    for heads, rows in ((32, 8), (32, 24), (64, 64)):  # one tile of 16, of 32, many of 128
        kv_heads = 8 if heads == 64 else 32
        cases += [case(f"fp16 D128 {heads // kv_heads}×{rows} rows", heads, kv_heads, rows, 128, torch.float16)]
    cases += [case("fp32 D128 4×16 rows", 32, 8, 16, 128, torch.float32)]
    cases += [case("fp32 D256 1×16 rows", 8, 8, 16, 256, torch.float32)]
    cases += [case("bf16 D256 8×64 rows", 8, 1, 64, 256, torch.bfloat16)]
    cases += [case("bf16 D256 2×16 rows soft cap, window", 16, 8, 16, 256, torch.bfloat16, softcap=50.0, window=4096)]
    return cases
