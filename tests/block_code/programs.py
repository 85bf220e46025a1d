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
from shared import once

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests/block_code/main.cpp"
CXX = shutil.which(os.environ.get("CXX", "g++"))
BUILDS = {
    "thread": ["-O1", "-g", "-fsanitize=thread"],
    # Optimising takes longer than all that runs, and hides accesses.
    "address": ["-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DGSD_CHECK_DIVERGENCE"],
}
#: Of what is compiled against PyTorch's headers.
TORCH = ["-DTORCH_TARGET_VERSION=0x020A000000000000", "-isystem", Path(torch.__file__).parent / "include"]
ONE_TYPE = "-DGSD_ONE_TYPE"  # float16 and not bfloat16: half of a program's code, and the same accesses
DIFFERENT, DIVERGENT, RACE = 3, 4, 66
HUNG = "hung"


def needs(*files: Path) -> list[pytest.MarkDecorator]:
    """Marks of tests that compile these files."""
    missing = not all(file.exists() for file in files)
    return [
        pytest.mark.quick,
        pytest.mark.slow,
        pytest.mark.kept("csrc", "tests/block_code"),
        pytest.mark.skipif(CXX is None, reason="no C++ compiler (CXX, g++)"),
        pytest.mark.skipif(missing, reason="not a source checkout"),
    ]


def build(source: Path, program: Path, flags: Sequence[str | Path]) -> Path:
    command = [CXX, "-std=c++20", "-pthread", "-Wall", "-Wextra", "-ffp-contract=off", *flags, source, "-o", program]
    subprocess.run(list(map(str, command)), check=True)
    return program


def build_all(source: Path, folder: Path, builds: dict[str, list[str]] = BUILDS) -> None:
    """One program for every sanitizer, below its name."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: build(source, folder / name, builds[name]), builds))


def programs_of(factory: pytest.TempPathFactory, source: Path) -> dict[str, Path]:
    """Much unrolled code for every sanitizer, without debug information, which doubles the time to compile it."""
    flags = {name: [flag for flag in BUILDS[name] if flag != "-g"] for name in BUILDS}
    flags["thread"].append(ONE_TYPE)
    folder = once(factory, source.stem, lambda folder: build_all(source, folder, flags))
    return {name: folder / name for name in BUILDS}


def build_mutated(source: Path, folder: Path, headers: dict[Path, str]) -> None:
    """``mutated``, a program of changed headers, in which ``mutation()`` is the number that ``run`` is told."""
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    shutil.copytree(source.parent, folder / "tests/block_code", ignore=shutil.ignore_patterns("__pycache__"))
    for header, text in headers.items():
        (folder / header.relative_to(ROOT)).write_text(text)
    flags = ["-O0", "-w", ONE_TYPE, "-include", source.parent / "mutation.h"]
    build(folder / source.relative_to(ROOT), folder / "mutated", flags)


def run(program: Path, *arguments: object, timeout: float = 120, mutation: int = 0) -> tuple[int | str, str]:
    environment = {**os.environ, "TSAN_OPTIONS": f"exitcode={RACE} halt_on_error=1", "ASAN_OPTIONS": "exitcode=67"}
    environment["GSD_MUTATION"] = str(mutation)
    try:
        done = subprocess.run(
            [str(program), *map(str, arguments)], capture_output=True, text=True, timeout=timeout, env=environment
        )
    except subprocess.TimeoutExpired:
        return HUNG, ""
    return done.returncode, done.stderr
