"""Processors without the levels' instructions: the library loads, and rows are right.

The first is read in the library as it was built. For the second QEMU stands in for older processors (Debian's
qemu-user-static); it refuses instructions that they lack.
"""

from __future__ import annotations

import bisect
import os
import re
import shutil
import subprocess
import sys
from functools import cached_property
from pathlib import Path

import pytest
from block_code.programs import CXX
from ops.contracts.backends import needs_cpu

from gsd_kernels.compiled import LIBRARIES

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "gsd_kernels" / LIBRARIES["cpu"]
QEMU = "qemu-x86_64-static"
RIGHT = """
import sys, torch
sys.path.insert(0, "tests")
from decoders import check_alike
from gsd_kernels import cpu_levels
from gsd_kernels.ops.decoder_rows import decoder_rows
from gsd_kernels.ops.packed import unpack_rows
from gsd_kernels.ops.row_linear import row_linear
from ops.contracts.decoder import decoder_case
from ops.contracts.packed import KINDS, packed_matrix, width_of
assert cpu_levels.active() == "avx2" and "AVX-512" in cpu_levels.levels()["avx512"]
for dtype in (torch.bfloat16, torch.float16):
    found = []
    for backend in ("reference", "cpu"):
        weights, case = decoder_case(dtype)
        logits, hidden, _ = decoder_rows(weights, **case, keep=5, backend=backend)
        found.append([logits, hidden, *case["k_caches"], *case["v_caches"]])
    check_alike(found[::-1], dtype)
    rows = {"token_ids", "positions", "slots", "ancestor_mask"}
    for row in range(5):  # behind its ancestors, which lie in the caches by now
        one = {name: t[:, row : row + 1] if name in rows else t for name, t in case.items()}
        assert torch.equal(decoder_rows(weights, **one, keep=1, backend="cpu")[0][:, 0], found[1][0][:, row])
    for kind in KINDS:
        matrix, x = packed_matrix(kind, 7, width_of(kind, 100)), torch.randn(5, width_of(kind, 100)).to(dtype)
        assert torch.equal(row_linear(x, matrix), row_linear(x, unpack_rows(matrix, dtype=dtype))), kind
print("right")
"""
"""The rows of a small decoder, and products with packed weights: what texts are made of. The emulator is slow."""

pytestmark = [
    pytest.mark.quick,
    needs_cpu,
    pytest.mark.kept(
        *("csrc", "setup.py", "gsd_kernels", "tests/decoders.py", "tests/ops/contracts"),
    ),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="not an x86-64 machine"),
]

HARMLESS = ("endbr64", "tzcnt", "xgetbv")
"""No-op on the baseline; ``bsf`` there, where the compiler knows of a bit; run after ``cpuid`` said that it may."""


def output_of(*command: str | Path, stdin: str = "", status: int = 0) -> str:
    done = subprocess.run([str(c) for c in command], input=stdin, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def no_emulator() -> str | None:
    """Why there is no processor to emulate, or ``None``."""
    if shutil.which(QEMU) is None:
        return f"no {QEMU} (Debian's package qemu-user-static)"
    version = re.search(r"version (\d+)\.(\d+)", output_of(QEMU, "--version"))
    if version is None or tuple(map(int, version.groups())) < (7, 2):
        return f"{QEMU} is older than 7.2, which knows AVX2"
    return None


class Disassembly:
    """Functions of a library without symbols, which its unwinding table delimits, and what leads where."""

    def __init__(self, library: Path) -> None:
        self.library = library
        frames = output_of("readelf", "--debug-dump=frames", library)
        self.cuts = sorted({int(x, 16) for pair in re.findall(r"pc=(\w+)\.\.(\w+)", frames) for x in pair})
        self.lines: dict[int, list[str]] = {}  # by the beginning of a function, what its instructions are
        self.stubs: dict[int, str] = {}  # of the linkage table, by address: the symbol or address that they jump to
        text = output_of("objdump", "--disassemble", "--no-show-raw-insn", library)
        for section in text.split("Disassembly of section ")[1:]:
            name, _, body = section.partition(":")
            if name.startswith(".plt"):
                stubs = re.findall(r"^0*(\w+) <(?:\*ABS\*\+0x)?(\S+)@plt>:", body, re.MULTILINE)
                self.stubs |= {int(address, 16): symbol for address, symbol in stubs}
                continue
            for address, line in re.findall(r"^ +(\w+):\t(.*)", body, re.MULTILINE):
                self.lines.setdefault(self.beginning(int(address, 16)), []).append(line)

    def beginning(self, address: int) -> int:
        """Of the function that ``address`` lies in; a few of the compiler's runtime have no entry in the table."""
        place = bisect.bisect_right(self.cuts, address)
        return self.cuts[place - 1] if place else 0

    @cached_property
    def symbols(self) -> dict[str, tuple[int, str]]:
        """Addresses and types of the symbols that the library defines."""
        listed = output_of("nm", "--dynamic", "--defined-only", self.library)
        return {name: (int(address, 16), kind) for address, kind, name in map(str.split, listed.splitlines())}

    @cached_property
    def at_load(self) -> tuple[list[int], list[int]]:
        """What runs while the library is loaded: static initialisers, and what chooses among clones of a function."""
        sections = output_of("readelf", "--section-headers", "--wide", self.library)
        start, size = (int(x, 16) for x in re.search(r"\.init_array +\w+ +(\w+) \w+ (\w+)", sections).groups())
        relocations = output_of("objdump", "--dynamic-reloc", self.library)
        listed = re.findall(r"^(\w+) +\w+_(RELATIVE|IRELATIVE) +\S*0x(\w+)$", relocations, re.MULTILINE)
        initialisers = [value for place, _, value in listed if start <= int(place, 16) < start + size]
        choosing = [int(value, 16) for _, kind, value in listed if kind == "IRELATIVE"]
        choosing += [address for address, kind in self.symbols.values() if kind == "i"]
        return [int(value, 16) for value in initialisers], choosing

    def led_to(self, function: int, *, addresses: bool) -> set[int]:
        """Functions that this one calls or jumps to, and with ``addresses`` those whose address it takes."""
        found = set()
        for line in self.lines[function]:
            called = re.match(r"(?:\w+ )*(?:call|j\w+) +([0-9a-f]+) <", line)
            taken = re.search(r"\blea .*# ([0-9a-f]+) <", line) if addresses else None
            for match in filter(None, (called, taken)):
                target = int(match[1], 16)
                if target in self.stubs:
                    target = self.symbols.get(self.stubs[target], (-1, ""))[0]
                found.add(self.beginning(target))
        return found & self.lines.keys()

    def reached(self, roots: list[int], *, addresses: bool, known: frozenset[int] = frozenset()) -> frozenset[int]:
        """All functions that lead on from ``roots`` but ``known`` ones."""
        found, left = set(known), [self.beginning(root) for root in roots]
        while left:
            function = left.pop()
            if function not in found:
                found.add(function)
                left += self.led_to(function, addresses=addresses)
        return frozenset(found - known)

    def beyond_the_baseline(self, functions: frozenset[int]) -> dict[str, str]:
        """Instructions that the assembler refuses for x86-64 as it was in 2003: each, and the assembler's words."""
        lines = {line for function in functions for line in self.lines[function]}
        distinct = sorted({line.partition("#")[0].partition(" <")[0].strip() for line in lines})
        distinct.append("vaddps %ymm0, %ymm0, %ymm0 ")
        source = "\n".join([".arch generic64", *distinct, ""])
        refused = output_of("as", "-o", os.devnull, "-", stdin=source, status=1)
        complaints = re.findall(r":(\d+): Error: (.* is not supported on .*)", refused)
        found = {distinct[int(line) - 2]: why for line, why in complaints}
        assert found.pop(distinct[-1]), "the assembler looks at instruction sets"
        return {line: why for line, why in found.items() if not line.startswith(HARMLESS)}


@pytest.mark.skipif(None in map(shutil.which, ("objdump", "as")), reason="no binutils (objdump, as)")
def test_what_runs_before_a_level_is_chosen_needs_the_baseline_alone():
    found = Disassembly(LIBRARY)
    initialisers, resolvers = found.at_load
    listing = [address for name, (address, _) in found.symbols.items() if name.startswith("gsd_cpu_")]
    # What chooses takes the addresses of what it chooses from; what registers the ops takes those of the ops.
    choosing = found.reached(listing + resolvers, addresses=False)
    others = found.reached(initialisers, addresses=True, known=choosing)
    assert any("cpuid" in line for function in choosing for line in found.lines[function])
    assert len(resolvers) > 5 and len(initialisers) > 10 and len(others) > 100
    assert found.beyond_the_baseline(choosing) == {}
    assert found.beyond_the_baseline(others) == {}
    levels = found.lines.keys() - choosing - others
    assert any("zmm" in line for function in levels for line in found.lines[function])


@pytest.fixture
def emulator():
    if missing := no_emulator():
        pytest.skip(missing)
    return QEMU


CHOICE = """
import ctypes, os, sys
library = ctypes.CDLL(sys.argv[1], mode=os.RTLD_LAZY)
for name in ("gsd_cpu_level", "gsd_cpu_levels"):
    getattr(library, name).restype = ctypes.c_char_p
    print(getattr(library, name)().decode())
"""
LEVELS = {"Nehalem": "portable", "Haswell": "avx2", "EPYC-Rome": "avx2"}


@pytest.mark.skipif(CXX is None, reason="no C++ compiler (CXX, g++)")
@pytest.mark.parametrize("processor", LEVELS)
def test_a_processor_gets_the_best_of_its_levels(processor, emulator, tmp_path):
    """Which proves itself before it serves. Of torch, which takes the emulator long, the library needs no more here."""
    output_of(CXX, "-shared", "-x", "c", "/dev/null", "-o", tmp_path / "libtorch.so")
    environment = {**os.environ, "GSD_KERNELS_CPU_LEVEL": "", "LD_LIBRARY_PATH": str(tmp_path)}
    command = [emulator, "-cpu", processor, sys.executable, "-S", "-c", CHOICE, LIBRARY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    level, *known = done.stdout.splitlines()
    assert level == LEVELS[processor] and f"{level}\t" in known
    assert "avx512\tthis processor has no AVX-512 F, BW and VL" in known


@pytest.mark.slow
def test_rows_are_right_on_a_processor_without_avx_512(emulator):
    command = [emulator, "-cpu", "Haswell", sys.executable, "-c", RIGHT]
    environment = {**os.environ, "GSD_KERNELS_CPU_LEVEL": ""}  # a level that is asked for may not be there
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT, env=environment)
    assert done.returncode == 0 and done.stdout == "right\n", done.stderr[-3000:]
