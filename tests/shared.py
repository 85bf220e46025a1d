"""What one test process makes and the others use, programs that take seconds to compile; and examples as modules."""

from __future__ import annotations

import fcntl
import os
import runpy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers


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


@cache
def program(name: str) -> SimpleNamespace:
    """The names of a program of ``examples/``; that in 100 lines is the oracle of merge, flatten and whole texts."""
    path = Path(__file__).resolve().parents[1] / "examples" / f"{name}.py"
    return SimpleNamespace(**runpy.run_path(str(path), run_name=name))


def keep_modules(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have transformers copy the code of folders to ``folder``, not to the user's cache."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
    monkeypatch.syspath_prepend(folder)
