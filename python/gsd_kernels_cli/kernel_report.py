"""A report of what the compiler makes of every Triton kernel, for GPUs that are not here.

The ops' own launch code runs on meta tensors under a driver that only names a target; triton compiles down to machine
code with the assembler in its wheel, and the disassembly is counted. Importing this module imports no triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gsd_kernels.ops.line import Part
from gsd_kernels.ops.table import all_ops

ARCHS = (80, 90, 100)
SHARED_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that one thread block can have."""

MAX_STACK_BYTES = 8
"""Bytes of stack that a kernel may use: spilled registers live there."""


@dataclass(frozen=True)
class Case:
    """One launch of one op in a shipped configuration.

    Attributes:
        op: its name.
        name: of the configuration.
        sizes: what the letters of the op's line stand for, of sizes and numbers; a number without is ``None``.
        dtype: of tensors of any floats.
        with_: optional tensors that are there.
    """

    op: str
    name: str
    sizes: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16
    with_: tuple[str, ...] = ()

    @property
    def room(self) -> str:
        """The package of the op's functions."""
        return all_ops()[self.op].reference.__module__.rpartition(".")[0]

    def launch(self) -> object:
        """Launch the op's kernels on tensors without content, as its line has them."""
        dtypes = {"float": self.dtype, "any": self.dtype}

        def new(part: Part) -> Tensor:
            dtypes[part.name] = dtypes.get(part.dtype) or getattr(torch, part.dtype)
            shape = [int(size) if size.isdigit() else self.sizes[size] for size in part.sizes or ()]
            return torch.empty(shape, dtype=dtypes[part.name], device="meta")

        def given(part: Part) -> Any:
            if part.tensors is not None:
                return [new(one) for one in part.tensors]
            if part.sizes is None:
                return self.sizes.get(part.letters)
            return None if part.optional and part.name not in self.with_ else new(part)

        arguments = [given(part) for part in all_ops()[self.op].line.arguments]
        return getattr(import_module(f"{self.room}.triton"), self.op)(*arguments)


def kernel_table(archs: Sequence[int] = ARCHS, read: Collection[str] | None = None) -> list[dict[str, Any]]:
    """One row per compiled kernel: registers, stack, shared memory, spills, load width, matrix instructions.

    Args:
        archs: compute capabilities, e.g. 90.
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
            seen = set()
            for kernel, compiled in compile_launches(case.launch, arch):
                if compiled.hash not in seen:
                    seen.add(compiled.hash)
                    row = facts(compiled, arch, read is None or kernel in read)
                    rows.append({"op": case.room.rpartition(".")[2], "case": case.name, "kernel": kernel, **row})
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
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.metadata.target.arch != arch:
            raise RuntimeError(f"{self.fn.__name__} was compiled for {kernel.metadata.target}, not {arch}")
        compiled.append((self.fn.__name__.strip("_").removesuffix("_kernel"), kernel))
        return kernel

    target = SimpleNamespace(  # so much of a triton driver as compiling needs
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: arch,  # by which triton caches kernels: a constant would return another arch's
        get_current_stream=lambda device=None: 0,
    )
    with knobs.language.scope(), patch.object(driver, "_active", target), patch.object(JITFunction, "run", record):
        knobs.language.default_fp_fusion = True  # 3.9 warns when nobody has said
        launch()
    return compiled


def facts(compiled: Any, arch: int, read: bool = True) -> dict[str, Any]:
    """Resources of one compiled kernel and, if they are to be read, counts of its instructions."""
    from triton.knobs import nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run(nvidia.cuobjdump.path, "--dump-resource-usage", file.name)
        # Without an analysis of branches.
        code = _run(nvidia.nvdisasm.path, "-c", "-ndf", file.name) if read else None
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
    widths = [int(w) for op in opcodes if op.startswith("LDG") for w in re.findall(r"\.(64|128|256)\b", op)]
    return {
        "spill_stores": count("STL"),
        "spill_loads": count("LDL"),
        "load_bits": max(widths, default=32),  # of the widest global load
        "matrix": ", ".join(matrix) or "-",
        "instructions": sum(opcodes.values()),
    }


_MATRIX = (("HMMA", "HMMA"), ("HGMMA", "HGMMA"), ("UTCMMA", "UTC.*MMA"))


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def shipped_cases() -> list[Case]:
    """Launches that between them use every kernel in every shipped configuration family."""
    half, single = torch.bfloat16, torch.float32
    return [
        _attention(32, 8, 16, 64),  # the tile of 64
        _attention(32, 32, 24, 80),  # of 32, padded dimensions
        _attention(32, 32, 8, 96, torch.float16),  # of 16
        _attention(32, 8, 16, 128),
        _attention(64, 8, 64, 128),  # of 128
        _attention(16, 8, 16, 256),
        _attention(8, 1, 64, 256),
        _attention(8, 1, 64, 256, about=", soft cap, window", p=50.0, w=4096),
        _attention(64, 8, 64, 64, half, "sinks", about=", sinks, window", w=128),
        _attention(40, 8, 64, 128, about=", chunks, window", c=8192),
        _attention(32, 8, 16, 128, single),
        _attention(8, 8, 16, 256, single),
        _merge("4×3 candidates, 64 nodes", N=64, L=1, W=4, K=3),
        _merge("tree", N=64, L=1, W=4, K=3, c=-1),
        _merge("64×8 candidates, 1024 nodes", N=521, L=2, W=64, K=8),
        *(
            Case("flatten", f"branch {branch}, {rows} rows", {"B": 1, "N": 1024, "K": branch, "R": rows, "D": rows - 1})
            for branch, rows in ((3, 32), (32, 128))
        ),
        Case("verify", "128 rows", {"B": 1, "R": 128, "R/32": 4, "E": 2, "D": 24}),
        _sampling("warped_log_probs", "distribution after the warpers", half, R=8, t=0.7, k=20, p=0.9, m=0.05),
        _sampling("sample_rows", "greedy", half),
        _sampling("sample_rows", "temperature", half, t=0.7),
        _sampling("draft_candidates", "temperature, candidates", half, t=0.7, K=8),
        _sampling("sample_rows", "min-p", half, t=0.7, m=0.05),
        _sampling(
            "draft_candidates", "all warpers, candidates", single, *"temperatures top_ks top_ps min_ps".split(), K=4
        ),
        *_caches(128, half, 11),
        *_caches(256, single, 128),
    ]


SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _attention(
    heads: int,
    kv_heads: int,
    rows: int,
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    *more: str,
    about: str = "",
    **limits: Any,
) -> Case:
    name = f"{SHORT[dtype]} D{dim} {heads // kv_heads}×{rows} rows{about}"
    sizes = {"B": 1, "H": heads, "G": kv_heads, "R": rows, "D": dim, "V": dim, "S": 8192, "W": 4, "N": 128}
    places = ("kv_start", "row_depths", "node_depths", *more)
    return Case("dag_attention", name, {**sizes, "s": dim**-0.5, **limits}, dtype, places)


def _merge(name: str, **sizes: int) -> Case:
    return Case("merge", name, {"B": 1, "l": 1, "c": 1, "r": -1.0, "p": -1.0, "F": sizes["W"], **sizes})


def _sampling(op: str, name: str, dtype: torch.dtype, *each: str, **sizes: Any) -> Case:
    off = {"t": 0.0, "k": 0, "p": 1.0, "m": 0.0}
    return Case(op, name, {"B": 1, "R": 64, "V": 128256, "n": True, **off, **sizes}, dtype, each)


def _caches(dim: int, dtype: torch.dtype, accepted: int) -> list[Case]:
    """Keys and values: a step's accepted rows behind the prefix, and a forward's into the cache."""
    name = f"{SHORT[dtype]} D{dim}"
    sizes = {"B": 1, "H": 8, "S": 4096, "D": dim, "V": dim, "P": accepted, "R": 64}
    return [
        Case("commit_kv", f"{name}, {accepted} rows", sizes, dtype),
        Case("write_kv", f"{name}, 64 rows", sizes, dtype),
    ]
