"""Processors without the levels' instructions: the library loads, every op runs, and rows are right.

QEMU stands in for older processors (Debian's qemu-user-static); it refuses instructions that they lack.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
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
from gsd_kernels.ops.table import all_ops
from gsd_kernels.ops.row_linear import row_linear
from ops.contracts.decoder import decoder_case
from ops.contracts.inputs import op_inputs
from ops.contracts.decoder import KINDS, packed_matrix, width_of
assert cpu_levels.active() == sys.argv[1] and "AVX-512" in cpu_levels.levels()["avx512"]
inputs = op_inputs()
for name in all_ops():
    getattr(torch.ops.gsd_kernels, name)(*inputs[name])
found, dtypes = [], (torch.bfloat16, torch.float16)
dtype, other = dtypes if sys.argv[1] == "avx2" else dtypes[::-1]
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
    matrix, x = packed_matrix(kind, 7, width_of(kind, 100)), torch.randn(5, width_of(kind, 100)).to(other)
    assert torch.equal(row_linear(x, matrix), row_linear(x, unpack_rows(matrix, dtype=other))), kind
print("right")
"""
"""Every op once; and the rows of a small decoder, products with packed weights, in another dtype: what texts are of."""

pytestmark = [
    pytest.mark.quick,
    needs_cpu,
    pytest.mark.kept(
        *("csrc", "setup.py", "gsd_kernels", "tests/decoders.py", "tests/ops/contracts"),
    ),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="not an x86-64 machine"),
]


def output_of(*command: str | Path) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def no_emulator() -> str | None:
    """Why there is no processor to emulate, or ``None``."""
    if shutil.which(QEMU) is None:
        return f"no {QEMU} (Debian's package qemu-user-static)"
    version = re.search(r"version (\d+)\.(\d+)", output_of(QEMU, "--version"))
    if version is None or tuple(map(int, version.groups())) < (7, 2):
        return f"{QEMU} is older than 7.2, which knows AVX2"
    return None


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
@pytest.mark.parametrize("processor", ["Nehalem", "Haswell"])
def test_ops_run_and_rows_are_right_on_older_processors(processor, emulator):
    """An op that had another level's instructions where no level is chosen would end the process."""
    command = [emulator, "-cpu", processor, sys.executable, "-c", RIGHT, LEVELS[processor]]
    environment = {**os.environ, "GSD_KERNELS_CPU_LEVEL": ""}  # a level that is asked for may not be there
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT, env=environment)
    assert done.returncode == 0 and done.stdout == "right\n", done.stderr[-3000:]
