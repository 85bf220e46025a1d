"""Rows of recurrent layers under the sanitizers: the op's own tests over a build of it that watches every access."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from block_code.programs import CXX, ROOT, TORCH, build, needs

SOURCE = ROOT / "csrc/cpu/state_rows.cpp"
TESTS = ROOT / "tests/ops/test_state_rows.py"
SANITIZERS = ("libasan.so", "libubsan.so")
PROGRAM = """
import ctypes, sys, pytest, torch
from gsd_kernels.backends import unavailable_reason
assert unavailable_reason("cpu", torch.device("cpu")) is None  # the compiled ops are there; these come in their place
ctypes.CDLL(sys.argv[1]).gsd_register(b"gsd_kernels")
sys.exit(pytest.main([sys.argv[2], "-o", "addopts=", "-p", "no:cacheprovider", "-q", "-x", "-s"]))
"""

pytestmark = [*needs(SOURCE), pytest.mark.kept("gsd_kernels", "tests/ops")]


def runtime(name: str) -> str:
    """A sanitizer's library, which a Python that was built without it must load first."""
    found = subprocess.run([CXX, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"the compiler has no {name}")
    return found


def watched(source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """The op's tests over a build of ``source``."""
    preload = " ".join(map(runtime, SANITIZERS))
    libraries = Path(torch.__file__).parent / "lib"
    flags = ["-O1", "-fPIC", "-shared", "-w", "-fsanitize=address,undefined", *TORCH]
    flags += [f"-I{SOURCE.parent}", f"-L{libraries}", "-ltorch_cpu", "-ltorch"]
    library = build(source, folder / "states.so", flags)
    options = {"ASAN_OPTIONS": "detect_leaks=0:exitcode=67", "UBSAN_OPTIONS": "halt_on_error=1", "LD_PRELOAD": preload}
    command = [sys.executable, "-c", PROGRAM, library, TESTS]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | options, timeout=300)


def test_no_bad_accesses(tmp_path):
    done = watched(SOURCE, tmp_path)
    assert done.returncode == 0 and " passed" in done.stdout, (done.stdout + done.stderr)[-3000:]


@pytest.mark.many
def test_a_bad_access_is_seen(tmp_path):
    text = SOURCE.read_text()
    for header in ("../torch_ops/common.h", "lanes.h"):
        text = text.replace(f'#include "{header}"', f'#include "{(SOURCE.parent / header).resolve()}"')
    wrong = text.replace("size, of + place * size);", "size, of + z.places * z.batch * size);")
    assert wrong != text
    (tmp_path / "wrong.cpp").write_text(wrong)
    done = watched(tmp_path / "wrong.cpp", tmp_path)
    assert done.returncode == 67 and "heap-buffer-overflow" in done.stderr
