"""The CPU's ops under the sanitizers.

The forward of rows, and how much it allocates: the rows' activations, whatever the weights. Rows of recurrent layers,
by the op's own tests over a build of it that watches every access.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from block_code.programs import BUILDS, CXX, ROOT, TORCH, build, build_all, needs, run
from shared import once

DECODER = ROOT / "tests/block_code/decoder.cpp"
#: Compiled together: most of the time goes into PyTorch's headers.
UNITS = (
    ("csrc/cpu/decoder", "csrc/cpu/team", "csrc/cpu/weights", "tests/block_code/decoder"),
    tuple(
        f"csrc/cpu/{name}"
        for name in (
            "path_attention",
            "model_math",
            "instruction_sets",
            "products_portable",
            "row_math",
            "row_forms",
        )
    ),
)

pytestmark = needs(DECODER, ROOT / "csrc/cpu")


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    builds = {**BUILDS, "count": ["-O1", "-DGSD_COUNT"]}

    def make(folder: Path) -> None:
        units = [folder / f"unit{i}.cpp" for i in range(len(UNITS))]
        for unit, files in zip(units, UNITS, strict=True):
            unit.write_text("".join(f'#include "{ROOT / file}.cpp"\n' for file in files))
        build_all(units[0], folder, {name: [*flags, *TORCH, *units[1:]] for name, flags in builds.items()})

    folder = once(tmp_path_factory, "decoder", make)
    return {name: folder / name for name in builds}


@pytest.mark.parametrize("sanitizer", BUILDS)
@pytest.mark.parametrize("rows", [1, 19, 50])
def test_no_races_and_no_bad_accesses(decoders, sanitizer, rows):
    status, output = run(decoders[sanitizer], rows, 421, 333, 1)
    assert status == 0, output[-3000:]


def test_only_activations_of_the_rows_are_allocated(decoders):
    def allocated(rows: int, hidden: int, inner: int, layers: int) -> int:
        status, output = run(decoders["count"], rows, hidden, inner, layers)
        assert status == 0
        return int(output)

    few = allocated(16, 64, 150, 2)
    assert allocated(16, 64, 150, 6) == few
    for rows, hidden, inner in ((16, 64, 150), (32, 64, 150), (16, 256, 600), (64, 256, 600)):
        count, q = 2 * rows, 40  # of two sequences
        activations = 4 * count * (2 * hidden + 2 * q + 2 * 20 + inner + 10)
        packed = 4 * (count + 16) * (max(hidden, inner) + 32)
        strips = 4 * 2 * count * 256
        attention = 4 * 64 * (512 + rows + 64) + 4 * count * rows + (1 << 14)
        assert allocated(rows, hidden, inner, 2) <= activations + 2 * packed + strips + attention


# Recurrent layers.

STATES = ROOT / "csrc/cpu/state_rows.cpp"
TESTS = ROOT / "tests/ops/test_state_rows.py"
SANITIZERS = ("libasan.so", "libubsan.so")
PROGRAM = """
import ctypes, sys, pytest, torch
from gsd_kernels.backends import unavailable_reason
assert unavailable_reason("cpu", torch.device("cpu")) is None  # the compiled ops are there; these come in their place
ctypes.CDLL(sys.argv[1]).gsd_register(b"gsd_kernels")
sys.exit(pytest.main([sys.argv[2], "-o", "addopts=", "-p", "no:cacheprovider", "-q", "-x", "-s"]))
"""


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
    flags += [f"-I{STATES.parent}", f"-L{libraries}", "-ltorch_cpu", "-ltorch"]
    library = build(source, folder / "states.so", flags)
    options = {"ASAN_OPTIONS": "detect_leaks=0:exitcode=67", "UBSAN_OPTIONS": "halt_on_error=1", "LD_PRELOAD": preload}
    command = [sys.executable, "-c", PROGRAM, library, TESTS]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | options, timeout=300)


@pytest.mark.kept("gsd_kernels", "tests/ops")
def test_no_bad_accesses_of_states(tmp_path):
    done = watched(STATES, tmp_path)
    assert done.returncode == 0 and " passed" in done.stdout, (done.stdout + done.stderr)[-3000:]


@pytest.mark.many
@pytest.mark.kept("gsd_kernels", "tests/ops")
def test_a_bad_access_is_seen(tmp_path):
    text = STATES.read_text()
    for header in ("../torch_ops/common.h", "lanes.h"):
        text = text.replace(f'#include "{header}"', f'#include "{(STATES.parent / header).resolve()}"')
    wrong = text.replace("size, of + place * size);", "size, of + z.places * z.batch * size);")
    assert wrong != text
    (tmp_path / "wrong.cpp").write_text(wrong)
    done = watched(tmp_path / "wrong.cpp", tmp_path)
    assert done.returncode == 67 and "heap-buffer-overflow" in done.stderr
