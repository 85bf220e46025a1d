"""The CUDA library, without a GPU: compiles for every architecture without spills, loads, registers its ops."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from kept import once

from gsd_kernels.ops.table import all_ops

ROOT = Path(__file__).parents[2]
ARCHS = ("8.0", "9.0a", "10.0") if os.environ.get("EVERY") else ("8.0", "9.0a")
SOURCES = "".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "csrc/cuda").glob("*.cu")))
ATTENTION = ("attention_split_kernel", "attention_combine_kernel", "path_split_kernel", "path_end_kernel")
ROWS = (
    *("rows_product_kernel", "rows_group_kernel", "rows_turn_kernel"),
    *("rows_norm_kernel", "rows_embed_kernel", "rows_pair_kernel"),
)
SEQUENCES = set(re.findall(r"^GSD_LAUNCH\((\w+)", SOURCES, re.MULTILINE))  # arguments of the kernel of groups
KERNELS = (*SEQUENCES, *set(re.findall(r"\b(\w+_kernel)\(", SOURCES)) - {"sequence_kernel", *ATTENTION, *ROWS})
CUDA_OPS = [name for name, op in all_ops().items() if "cuda" in op.implementations]

ELEMENTS, HEAD_DIMS, WARPS = ("Half", "Bfloat16"), (64, 128), (1, 2, 4)  # of the attention
TILE_ROWS = (16, 32, 64)  # of a product
ONE_SIZE = ("rows_norm", "rows_embed", "rows_pair")
WIDE_ROWS = (32, 64)  # of one of twice as many outputs
GROUP_ROWS = (64, 128, 256)  # of one by groups of warps
PATH_WARPS = (1, 4)


@functools.cache
def find_nvcc() -> str | None:
    if not (ROOT / "setup.py").exists():
        return None
    program = "import setuptools; setuptools.setup = lambda **_: None; import setup; print(setup.find_nvcc() or '')"
    environment = {**os.environ, "GSD_KERNELS_BUILD_CPU": "0", "GSD_KERNELS_BUILD_CUDA": "0"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.stdout.strip() or None


pytestmark = [
    pytest.mark.quick,
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.kept("csrc", "setup.py", "gsd_kernels"),
    pytest.mark.skipif(find_nvcc() is None, reason="no nvcc (CUDACXX, CUDA_HOME, PATH) or no checkout"),
]


@dataclass(frozen=True)
class Kernel:
    name: str
    arch: str
    registers: int
    stack: int
    spills: int
    static_shared: int


def parse_ptxas(log: str) -> list[Kernel]:
    """Kernels of an `nvcc -Xptxas -v` log."""
    kernels = []
    for part in log.split("Compiling entry function ")[1:]:
        mangled, arch = re.match(r"'(\w+)' for 'sm_(\d+)\w?'", part).groups()
        name = next((k for k in (*KERNELS, *ATTENTION, *ROWS) if k in mangled), mangled)
        if name in ATTENTION + ROWS:  # by type; head size and, for the splits, warps; rows of a product
            element, numbers = re.search(r"INS_\d+(Half|Bfloat16)((?:EL?[ib]?\d*)+)", mangled).groups()
            name = " ".join([name.removesuffix("_kernel"), element, *re.findall(r"L[ib](\d+)", numbers)])
        stack, stores, loads = map(
            int, re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part).groups()
        )
        used = re.search(r"Used (\d+) registers.*", part)
        shared = re.search(r"(\d+) bytes smem", used.group())
        registers = int(used.group(1))
        kernels.append(Kernel(name, arch, registers, stack, stores + loads, int(shared.group(1)) if shared else 0))
    return kernels


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    folder = once(tmp_path_factory, "cuda", build_library)
    return folder / "gsd_kernels/_cuda.abi3.so", (folder / "log.txt").read_text()


def build_library(folder: Path) -> None:
    """The shared object for all architectures, and the compiler's log beside it."""
    environment = {
        **os.environ,
        "GSD_KERNELS_BUILD_CPU": "0",
        "GSD_KERNELS_BUILD_CUDA": "1",
        "GSD_KERNELS_CUDA_ARCHS": ";".join((f"{ARCHS[0]}+PTX", *ARCHS[1:])),
        "MAX_JOBS": os.environ.get("MAX_JOBS", "2"),
    }
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(folder), "--build-temp", str(folder / "tmp")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-4000:]
    (folder / "log.txt").write_text(log)


def most_registers(kernel: Kernel) -> int:
    """What leaves enough blocks a multiprocessor."""
    wide = "split" in kernel.name and kernel.name.endswith(
        " 4"
    )  # tiles live in registers: 168, three blocks of four warps
    if wide or "path_end" in kernel.name or "group" in kernel.name:
        return 255 if wide and kernel.arch == "100" else 168
    if "split" in kernel.name:
        return 255  # four of two
    if "product" in kernel.name:  # four blocks of four warps, by shared memory too; fewer rows five; two of eight warps
        return 128 if " 128 " in kernel.name or " 64 64 " in kernel.name else 102  # outputs, rows
    return 64


def test_kernels_compile_for_every_architecture_without_spills(build):
    kernels = parse_ptxas(build[1])
    for name in (*KERNELS, *attention_kernels(), *rows_kernels()):
        found = {k.arch for k in kernels if k.name == name}
        assert found == {re.sub(r"\D", "", a) for a in ARCHS}, (name, found)
    for k in kernels:
        assert k.spills == 0 and k.stack == 0, f"{k.name} for sm_{k.arch} spills"
        assert k.registers <= most_registers(k), f"{k.name} for sm_{k.arch}: {k.registers} registers"
        assert k.static_shared <= 48 * 1024, "more than a block may have without opting in"
        assert k.static_shared == 0 or k.name not in KERNELS, "it may have all of a block (shared_memory.h)"
        assert "group" not in k.name or (k.static_shared > 0) == (k.arch == "90"), "by which the launch knows of code"


def attention_kernels() -> list[str]:
    types = [f"{e} {d}" for e in ELEMENTS for d in HEAD_DIMS]
    split = [f"attention_split {t} {w}" for t in types for w in WARPS]
    split += [f"path_split {t} {w}" for t in types for w in PATH_WARPS]
    return split + [f"{name} {t}" for name in ("attention_combine", "path_end") for t in types]


def rows_kernels() -> list[str]:
    tiles = [f"64 {rows} {packed}" for rows in TILE_ROWS for packed in (0, 1)]
    sizes = {"rows_product": [*tiles, *(f"128 {rows} 0" for rows in WIDE_ROWS)], "rows_turn": HEAD_DIMS}
    sizes["rows_group"] = GROUP_ROWS
    templates = [f"{name} {e} {size}" for name in sizes for e in ELEMENTS for size in sizes[name]]
    return templates + [f"{name} {e}" for name in ONE_SIZE for e in ELEMENTS]


@pytest.fixture(scope="module")
def dump(build):
    """What the library holds for an architecture, ``sass`` or ``ptx``."""
    backend = pytest.importorskip("triton.backends.nvidia")  # which brings the toolkit's disassembler
    cuobjdump = Path(backend.__file__).parent / "bin/cuobjdump"

    @functools.cache
    def dumped(what: str, arch: str) -> str:
        command = [cuobjdump, "-arch", arch, f"--dump-{what}", build[0]]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return dumped


@pytest.fixture(scope="module")
def machine_code(dump):
    """Kernels of a name for an architecture, as instructions."""

    def kernels(name: str, arch: str) -> list[str]:
        return [part for part in dump("sass", arch).split("Function : ")[1:] if name in part.split("\n")[0]]

    return kernels


COPIES = (
    "LDGSTS.E.BYPASS.128",
    "LDSM.16.M88.4",
    "HMMA.16816.F32",
)  # past the first cache; ldmatrix; tensor cores
DEPENDENT = ("ACQBULK", "PREEXIT")  # it waits for the launch before, and lets the next one begin
TILES = ("attention_split_kernel", "path_split_kernel", "path_end_kernel")
TYPES = len(ELEMENTS) * len(HEAD_DIMS)
#: Kernels of these names, an architecture, and how many there are; what the machine code of each has, and has not.
CODE = {
    "attention": (TILES, "sm_80", TYPES * 6, (*COPIES, "LDSM.16.MT88.4", "MUFU.EX2"), ()),
    "attention of rows, dependent": (TILES[1:], "sm_90a", TYPES * 3, DEPENDENT, ()),
    "products": (("product_kernel",), "sm_80", 16, COPIES, ("ACQBULK", "PREEXIT", "UBLKPF.L2")),
    "products, dependent": (("product_kernel",), "sm_90a", 16, (*COPIES, *DEPENDENT, "UBLKPF.L2"), ()),
    "products by groups": (
        *(("rows_group_kernel",), "sm_90a", len(ELEMENTS) * len(GROUP_ROWS)),
        ("UTMACCTL.PF", "UBLKPF.L2", "SYNCS.PHASECHK.TRANS64", *DEPENDENT, "UCGABAR_ARV"),
        (" HMMA", "LDL", "STL", "LDGSTS"),
    ),
    "no groups before 9.0": (("rows_group_kernel",), "sm_80", len(ELEMENTS) * len(GROUP_ROWS), (), ("HGMMA",)),
}


@pytest.mark.parametrize("case", CODE)
def test_kernels_have_the_instructions_that_they_are_for(case, machine_code):
    names, arch, count, has, lacks = CODE[case]
    kernels = [code for name in names for code in machine_code(name, arch)]
    assert len(kernels) == count
    for code in kernels:
        for instruction in has + lacks:
            assert (instruction in code) == (instruction in has), (instruction, code.split("\n")[0])


def test_groups_of_warps_multiply_what_the_tensor_memory_accelerator_brings(build, machine_code):
    """Of a stage four instructions of all rows; registers are given and taken."""
    for code in machine_code("rows_group_kernel", "sm_90a"):
        rows = int(re.search(r"Li(\d+)E", code).group(1))
        assert len(re.findall(rf"HGMMA\.64x{rows}x16\.F32", code)) == code.count("HGMMA.64x") == 4, rows
        # Of the first stages and of the others: weights in one box, rows in one.
        assert code.count("UTMALDG") == code.count("UTMALDG.5D") == 2 * 2, rows
        gives = code.partition("USETMAXREG.DEALLOC.CTAPOOL 0x28 ")[2]  # 40 registers are left to the thread that brings
        assert gives and max(map(int, re.findall(r"\bR(\d+)\b", gives))) < 40, rows
    assert not re.search(r"C75\d\d|serialized", build[1]), "ptxas made the instructions wait for each other"


def test_the_rows_attention_rounds_as_it_is_written(dump):
    """Prefix and ends of rows agree bit for bit only if no kernel merges a score's product with the difference."""
    entries = dump("ptx", "sm_80").split(".entry ")[1:]
    kernels = [part for part in entries if re.search("path_(split|end)_kernel", part.split("(")[0])]
    assert len(kernels) == len(ELEMENTS) * len(HEAD_DIMS) * (len(PATH_WARPS) + 1)
    for code in kernels:
        made_by = {register: name for name, register in re.findall(r"^\s*([a-z][\w.]*)\s+(%f\d+), ", code, re.M)}
        exponents = {made_by[register] for register in re.findall(r"ex2\.approx\.ftz\.f32 %f\d+, (%f\d+)", code)}
        assert exponents == {"sub.f32"}, exponents
        assert code.count("mul.rn.f32") == 16, "a thread's scores of a tile, each rounded once"


@pytest.mark.parametrize("source", ["dag_attention.cu", "path_attention.cu", "rows.cu", "rows_group.cu"])
def test_tensor_cores_leave_older_gpus_to_the_other_ops(tmp_path, source):
    """Compute capability 7.5 has no asynchronous copies; a build for it must not fail because of one op."""
    command = [find_nvcc(), "-std=c++17", "-arch=sm_75", "-cubin", ROOT / "csrc/cuda" / source]
    done = subprocess.run([*command, "-o", tmp_path / "older.cubin"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_library_loads_beside_a_cpu_torch_and_registers_its_ops(build):
    program = (
        "import ctypes, sys, torch, gsd_kernels\n"
        "ctypes.CDLL(sys.argv[1]).gsd_register(b'gsd_kernels')\n"
        "has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "for name in sys.argv[2:]: assert has(f'gsd_kernels::{name}', 'CUDA'), name\n"
        "from pathlib import Path\n"
        "print(*gsd_kernels.compiled.architectures(Path(sys.argv[1])))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(build[0]), *CUDA_OPS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"{ARCHS[0]}+PTX", *ARCHS[1:]], "what it was compiled for"


def test_only_the_stable_abi_is_used(build):
    undefined = subprocess.run(["nm", "-D", "--undefined-only", "-C", build[0]], capture_output=True, text=True).stdout
    foreign = [line for line in undefined.splitlines() if re.search(r"\b(at|c10|torch)::", line)]
    assert not foreign, "symbols of torch's unstable C++ interface: " + "; ".join(foreign)


#: Macros that the headers of some supported torch lack, and what all of them have. TORCH_TARGET_VERSION hides newer
#: functions, but no macros.
NEWER_MACROS = {"STABLE_TORCH_ERROR_CODE_CHECK": "TORCH_ERROR_CODE_CHECK"}


@pytest.mark.parametrize("macro", NEWER_MACROS)
def test_the_sources_use_no_macro_that_the_oldest_torch_lacks(macro):
    files = [file for file in (ROOT / "csrc").rglob("*") if file.suffix in (".cpp", ".cu", ".h")]
    assert len(files) > 20
    named = [file.name for file in files if re.search(rf"\b{macro}\b", file.read_text(encoding="utf-8"))]
    assert not named, f"use {NEWER_MACROS[macro]} in {named}"
