"""Builds and runs the programs that execute block code as threads, under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kept import once

from .changes import plant

ROOT = Path(__file__).parents[2]
CODE = ROOT / "tests/block_code"
CXX = shutil.which(os.environ.get("CXX", "g++"))
BUILDS = {
    "thread": ["-O1", "-fsanitize=thread", "-DGSD_ONE_TYPE=Half"],
    # Optimising takes longer than all that runs, and hides accesses.
    "address": ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DGSD_CHECK_DIVERGENCE"],
}
if not os.environ.get("EVERY"):
    BUILDS["address"].append("-DGSD_ONE_TYPE=Bfloat16")
PROBLEMS = ("groups", "path_attention", "rows", "rows_group")
#: Of what is compiled against PyTorch's headers.
TORCH = ["-DTORCH_TARGET_VERSION=0x020A000000000000", "-isystem", Path(torch.__file__).parent / "include"]
RACE, BAD_ACCESS = 66, 67
CAUGHT = {*range(3, 11), RACE, BAD_ACCESS}
"""Statuses of a run in which something is wrong, as problems.h and the sanitizers have them."""


MARKS = [
    pytest.mark.quick,
    pytest.mark.slow,
    pytest.mark.kept("csrc", "tests/block_code"),
    pytest.mark.skipif(CXX is None, reason="no C++ compiler (CXX, g++)"),
]
"""Of tests that compile programs."""


def build(source: Path, program: Path, flags: Sequence[str | Path]) -> Path:
    command = [CXX, "-std=c++20", "-pthread", "-Wall", "-Wextra", "-ffp-contract=off", *flags, source, "-o", program]
    subprocess.run(list(map(str, command)), check=True)
    return program


def problems(factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The program of all problems, for every sanitizer.

    That of "address" is of changed headers, in which ``mutation()`` is the number that ``run`` is told, 0 for none.
    """

    def make(folder: Path) -> None:
        shutil.copytree(ROOT / "csrc", folder / "csrc")
        shutil.copytree(CODE, folder / "tests/block_code", ignore=shutil.ignore_patterns("__pycache__"))
        plant(folder / "csrc/algorithms")
        wanted = [(name, of) for name in PROBLEMS for of in BUILDS]

        def compiled(name: str, of: str) -> None:
            code, more = (
                (folder / "tests/block_code", ["-w", "-include", folder / "csrc/algorithms/mutation.h"])
                if of == "address"
                else (CODE, [])
            )
            build(code / f"{name}.cpp", folder / f"{of}-{name}.o", ["-c", *BUILDS[of], *more])

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(compiled, *zip(*wanted, strict=True)))
        for of in BUILDS:
            objects = [folder / f"{of}-{name}.o" for name in PROBLEMS]
            build(objects[0], folder / of, [*BUILDS[of], *objects[1:]])

    folder = once(factory, "block_code", make)
    return {name: folder / name for name in BUILDS}


def run(program: Path, *arguments: object, mutation: int = 0) -> tuple[int, str]:
    environment = {**os.environ, "TSAN_OPTIONS": f"exitcode={RACE} halt_on_error=1", "ASAN_OPTIONS": "exitcode=67"}
    environment["GSD_MUTATION"] = str(mutation)
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    return done.returncode, done.stderr
