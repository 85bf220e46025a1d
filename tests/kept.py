"""What is kept: verdicts of gates and a library between runs, programs and folders between the processes of a run.

What compiles for a minute is not compiled again for the same sources. A test with the mark ``kept("csrc", "setup.py")``
is skipped where it has passed before over the same inputs: the files below these places, its own file, compilers and
versions. The verdicts of passes lie in the user's cache folder;
``pytest --again`` runs all of them.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(os.environ.get("GSD_KERNELS_CACHE") or Path.home() / ".cache/gsd_kernels") / "gates"
SOURCES = (".py", ".h", ".cpp", ".cu", ".cuh", ".json", ".toml")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that asks no verdict."""
    parser.addoption("--again", action="store_true", help="run gates that have passed over the same sources, too")


@pytest.hookimpl(tryfirst=True)  # before fixtures, which compile
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what has passed."""
    place = verdict_of(item)
    if place is not None and place.exists() and not item.config.getoption("--again"):
        pytest.skip("it has passed over the same sources")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note a pass."""
    report = yield
    place = verdict_of(item)
    if place is not None and report.when == "call" and report.passed:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    return report


def verdict_of(item: pytest.Item) -> Path | None:
    """The file that says that a test has passed; ``None`` for tests that are always run."""
    marks = list(item.iter_markers("kept"))
    if not marks:
        return None
    inputs = sorted({str(item.path.relative_to(ROOT)), *(place for mark in marks for place in mark.args)})
    key = [item.nodeid, os.environ.get("EVERY", ""), tools(), *map(digest, inputs)]
    return FOLDER / hashlib.sha256("\n".join(key).encode()).hexdigest()[:24]


@functools.cache
def digest(place: str) -> str:
    """Of the sources below a place."""
    path, found = ROOT / place, hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and (file == path or file.suffix in SOURCES):
            found.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return found.hexdigest()


@functools.cache
def tools() -> str:
    """Compilers, and packages that compile or are compiled against."""
    said = [
        sys.version,
        *(metadata.version(name) for name in ("torch", "triton", "transformers") if util.find_spec(name)),
    ]
    for program in (os.environ.get("CXX", "g++"), "nvcc", "qemu-x86_64-static"):
        if shutil.which(program):
            said.append(subprocess.run([program, "--version"], capture_output=True, text=True).stdout)
    return "\n".join(said)


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder that ``make`` has filled, in the first process of this run that asks for ``name``; others wait."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of all workers
    folder, done = base / name, base / f"{name}.done"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            done.touch()
    return folder


def built(factory: pytest.TempPathFactory, name: str, inputs: tuple[str, ...], make: Callable[[Path], object]) -> Path:
    """A file that ``make`` compiles into a folder: the newest lies in the cache folder, by the sources below places."""
    key = hashlib.sha256("\n".join([tools(), *map(digest, inputs)]).encode()).hexdigest()[:24]
    place, others = FOLDER / f"{name}-{key}", list(FOLDER.glob(f"{name}-*"))
    if place not in others:
        FOLDER.mkdir(parents=True, exist_ok=True)
        new = shutil.copy(once(factory, name, make) / name, FOLDER / f"new-{os.getpid()}-{name}")
        os.replace(new, place)
        for other in others:
            other.unlink(missing_ok=True)
    return place


@functools.cache
def program(name: str) -> SimpleNamespace:
    """The names of a program of ``examples/``; that in 100 lines is the oracle of merge, flatten and whole texts."""
    path = Path(__file__).resolve().parents[1] / "examples" / f"{name}.py"
    return SimpleNamespace(**runpy.run_path(str(path), run_name=name))


def keep_modules(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have transformers copy the code of folders to ``folder``, not to the user's cache."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder))
    monkeypatch.syspath_prepend(folder)
