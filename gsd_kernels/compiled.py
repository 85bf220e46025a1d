"""The libraries of compiled ops that setup.py built beside this file, and why one cannot be loaded.

Each adds implementations to the schemas that :mod:`gsd_kernels.ops.table` defines in :data:`NAMESPACE`. Importing this
loads them and costs about a millisecond; nothing is compiled here.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

NAMESPACE = (__package__ or "").rpartition(".")[2]
"""Of the operators in ``torch.ops``: ``gsd_kernels``, or a name of its own of a build for the Hub (.ci/hub)."""

LIBRARIES = {"cpu": "_cpu.abi3.so", "cuda": "_cuda.abi3.so"}


def force_rows(overlap: int, ahead: int, group: int) -> None:
    """Tell the CUDA library, if it is loaded, what this thread forces (csrc/cuda/rows_tensors.h); -1: nothing."""
    if UNAVAILABLE["cuda"] is None:
        library("cuda").gsd_force_rows(overlap, ahead, group)


def tell_line(name: str, line: str) -> None:
    """Tell the libraries what an op's arguments are (csrc/torch_ops/arguments.h)."""
    for backend, reason in UNAVAILABLE.items():
        if reason is None:
            library(backend).gsd_line(name.encode(), line.encode())


@cache
def library(backend: str) -> ctypes.CDLL:
    """That of ``"cpu"`` or ``"cuda"``."""
    return ctypes.CDLL(str(Path(__file__).with_name(LIBRARIES[backend])))


def load(backend: str) -> str | None:
    """Load the library of ``"cpu"`` or ``"cuda"``; the reason if that is impossible."""
    path = Path(__file__).with_name(LIBRARIES[backend])
    if not path.exists():
        return f"the compiled {backend} ops were not built when the package was installed; " + (
            "install a C++ compiler, then this package again: pip install ."
            if backend == "cpu"
            else "with nvcc: GSD_KERNELS_BUILD_CUDA=1 pip install ."
        )
    try:
        library(backend).gsd_register(NAMESPACE.encode())
    except OSError as error:
        return f"{path.name} cannot be loaded: {error}"
    return None


@cache
def architectures(library: Path | None = None) -> tuple[str, ...]:
    """Compute capabilities that the CUDA library has code for, as setup.py names them; none where it does not say."""
    try:
        said = ctypes.CDLL(str(library or Path(__file__).with_name(LIBRARIES["cuda"]))).gsd_architectures
    except (AttributeError, OSError):  # not there, or built by another tool
        return ()
    said.restype = ctypes.c_char_p
    return tuple(said().decode().split(";"))


UNAVAILABLE: dict[str, str | None] = {
    "cpu": load("cpu"),
    # A CUDA library beside a CPU-only torch could be loaded but never run.
    "cuda": load("cuda") if torch.version.cuda is not None else "this torch was built without CUDA",
}
