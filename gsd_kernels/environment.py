"""Every environment variable that this package, its command line, its build and its benchmarks read.

docs/quickstart.md shows the table; a test holds it, and the sources, against it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

PREFIX = "GSD_KERNELS_"


class Variable(NamedTuple):
    """One variable.

    Attributes:
        name: without :data:`PREFIX`.
        values: that it takes, the default first.
        meaning: in a line.
    """

    name: str
    values: str
    meaning: str


VARIABLES = (
    Variable("CACHE", "the user's cache folder", "where learned costs and unpacked demo models are kept"),
    Variable("DEBUG", "`0`, `1`", "ranks of a sharded model compare every step"),
    Variable("CPU_LEVEL", "the best that proves itself, a level's name", "instruction set of the CPU's products"),
    Variable("FUSED_ROWS", "`1`, `0`, `cuda`", "rows as one operator; `0`: by modules; `cuda`: on every GPU that can"),
    Variable("ROWS_OVERLAP", "`1`, `0`", "whether launches of the CUDA operator of rows overlap"),
    Variable(
        "ROWS_AHEAD",
        "`24`, `0` to `64`",
        "megabytes of the next product's weights that launches which overlap ask for",
    ),
    Variable(
        "ROWS_GROUP",
        "what is faster, `0`, `1`",
        "more than 32 rows multiplied by groups of warps (wgmma) on 9.0, or not",
    ),
    Variable("CUDA_FIRST", "`triton`, `compiled`", "what `auto` takes first on a GPU"),
    Variable("SGLANG_OPTIONS", "none, a JSON object", "what SGLang has no flag for (docs/served.md)"),
    Variable("LLAMA_CPP", "PATH, a folder", "llama.cpp's binaries, for `bench real`"),
    Variable("BUILD_CPU", "`auto`, `0`, `1`", "build the C++ ops; `1`: fail where that is impossible"),
    Variable("BUILD_CUDA", "`auto`, `0`, `1`", "build the CUDA ops; `1`: fail without nvcc 12.5 or newer"),
    Variable("CUDA_ARCHS", "this machine's GPUs, `8.0;9.0+PTX`", "architectures of the CUDA ops"),
)


class Forced(threading.local):
    """Values that a thread takes for variables of the environment, whatever that says."""

    values: Mapping[str, str] = MappingProxyType({})


_OF_THREAD = Forced()


def forced() -> Mapping[str, str]:
    """Return what this thread takes for variables whatever the environment says, by name."""
    return _OF_THREAD.values


@contextmanager
def forcing(values: Mapping[str, str]) -> Iterator[None]:
    """Let this thread take ``values`` for these variables while the block runs.

    The environment stays as it is: other threads read it, and setting it is not safe beside that.
    """
    before = forced()
    _OF_THREAD.values = {**before, **values}
    try:
        yield
    finally:
        _OF_THREAD.values = before


def table() -> str:
    """The variables as a table in Markdown."""
    rows = [f"| `{PREFIX}{name}` | {values} | {meaning} |" for name, values, meaning in VARIABLES]
    return "\n".join(["| variable | default, other values | meaning |", "|---|---|---|", *rows])
